"""Output of a run: metrics.jsonl, step lines, trackers, startup summary and final lines."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.safe_files import open_own
from automodel_cli.training.config import LoggingConfig
from automodel_cli.training.metrics.flops import model_flops_utilisation
from automodel_cli.training.metrics.progress import (
    REASONS,
    Display,
    aligned,
    make_display,
    show_duration,
    show_number,
    step_label,
    step_text,
)
from automodel_cli.training.metrics_file import Row, keep_rows_until, to_line
from automodel_cli.training.trackers import Tracker, tracker_errors, tracker_nodes

Scalar = Tensor | float | int
_DATA = "data_seconds"


@dataclass(frozen=True)
class Machine:
    """Reference of rates: ranks, FLOPs per token and BF16 peak of one device (None: unknown)."""

    num_ranks: int = 1
    flops_per_token: float | None = None
    peak_flops: float | None = None


class MetricLogger:
    """Records steps and validations of one run. Exists on every rank; only rank 0 (`is_main`) writes and prints.

    - Values may be tensors. They are fetched only if a line is due (`logging.every`), so other steps do not synchronize
      with the device. metrics.jsonl still gets one row per step, in order. Steps fetched together share their time
      evenly.
    - The first step after a start or resume (compilation, allocation) has no rates: `tokens_per_second` and `mfu` are
      null, and the remaining time excludes it.
    - `resume_step` removes rows of later steps, which belong to an attempt that was lost.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LoggingConfig,
        *,
        num_steps: int,
        machine: Machine | None = None,
        is_main: bool = True,
        resume_step: int = 0,
        tracked_config: Mapping[str, object] | None = None,
    ):
        self._every, self._machine, self._is_main = config.every, machine or Machine(), is_main
        self._num_steps, self._resume_step, self._last_step = num_steps, resume_step, resume_step
        self._pending: list[tuple[int, dict[str, Scalar]]] = []
        self._rate_seconds, self._rate_steps, self._rate_tokens = 0.0, 0, 0.0
        self._last: dict[str, float | int | None] = {}
        self._last_val: dict[str, float | int | None] = {}
        self._clock = self._begin = time.perf_counter()
        self._trackers: list[Tracker] = []
        if not is_main:
            return
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        keep_rows_until(self._path, resume_step)
        self._file = open_own(self._path, "a+")
        self._display: Display = make_display(config.console, num_steps, resume_step)
        nodes = tracker_nodes(config.trackers)
        for node in nodes:
            with tracker_errors(node, "start"):
                self._trackers.append(node.start(run_dir.name, run_dir, tracked_config or {}))

    def start(self) -> None:
        """Start the clock. Call directly before the first step."""
        self._clock = time.perf_counter()

    def step(
        self,
        step: int,
        *,
        loss: Scalar,
        grad_norm: Scalar,
        lr: float,
        num_label_tokens: Scalar,
        num_tokens: Scalar,
        memory_gib: float | None = None,
        data_seconds: Scalar | None = None,
        unshown: Mapping[str, Scalar] = MappingProxyType({}),
        **more: Scalar,
    ) -> None:
        """Record optimizer step `step` (1-based). Loss, norm and counts cover all ranks.

        `memory_gib` is the maximum over ranks and may be None at steps that are not `due`. `data_seconds` is the
        longest time that a rank waited for its batches. `more` are further columns
        (reward, kl, ...), `unshown` are recorded but not printed. The time of a step starts at the end of the previous
        one and excludes `pause`.
        """
        self._last_step = step
        values: dict[str, Scalar] = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "num_label_tokens": num_label_tokens,
            "num_tokens": num_tokens,
            **more,
            **unshown,
        }
        if memory_gib is not None:
            values["memory_gib"] = memory_gib
        if data_seconds is not None:
            values[_DATA] = data_seconds
        self._pending.append((step, values))
        if self.due(step):
            self.flush()
            if self._is_main:
                line = {key: value for key, value in self._last.items() if key not in unshown or key in REASONS}
                self._display.step(step, step_text(line, self._machine.num_ranks), self._time_left())

    def due(self, step: int) -> bool:
        """Return whether a line is printed at this step, which synchronizes with the device. True at both ends."""
        return step == self._resume_step + 1 or step % self._every == 0 or step >= self._num_steps

    def validation(self, step: int, **values: Scalar) -> None:
        """Record a validation after `step` steps. The first value (`val_loss`) is printed."""
        self.flush()
        self._last_val = {"step": step, **_fetch(values)}
        if self._is_main:
            self._write(self._last_val)
            name = next(iter(values))
            number = show_number(self._last_val[name])
            self._display.line(f"{step_label(step, self._num_steps)}  {name.replace('_', ' ')} {number}")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time in this context (validation, checkpoint) from step times."""
        self.flush()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._clock += time.perf_counter() - begin

    def print(self, text: str) -> None:
        """Print a line above the live line, on rank 0."""
        if self._is_main:
            self._display.line(text)

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the startup summary: (short label, text) pairs. A text may have several lines."""
        for line in aligned(rows):
            self.print(line)

    def footer(self, rows: Sequence[tuple[str, str]] = ()) -> None:
        """Print the final lines: `done` with time and final losses, then `rows`."""
        self.flush()
        if not self._is_main:
            return
        self._display.close()
        num_steps = self._last_step - self._resume_step
        text = f"{num_steps} steps in {show_duration(time.perf_counter() - self._begin)}"
        if (loss := self.summary().get("loss")) is not None:
            text += f"   loss {show_number(loss)}"
        if "val_loss" in self._last_val:
            text += f" (val {show_number(self._last_val['val_loss'])})"
        self.header([("done", text), *rows])

    def summary(self) -> dict[str, float | int | None]:
        """Return the values of the last step and validation. Rates are means without first steps. If the last step had
        no update, it has no loss."""
        self.flush()
        rate = self._rate_tokens / self._rate_seconds if self._rate_seconds else None
        rates = {"tokens_per_second": rate, "mfu": self._mfu(rate), "step": self._last_step}
        last = {key: value for key, value in self._last.items() if value is None or not math.isnan(value)}
        return {**last, **self._last_val, **rates}

    def flush(self) -> None:
        """Fetch and write every recorded step."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        fetched = [(step, _fetch(values)) for step, values in pending]  # synchronizes with the device
        now = time.perf_counter()
        seconds, self._clock = (now - self._clock) / len(pending), now
        waits = [wait for _, values in fetched if (wait := values.pop(_DATA, None)) is not None]
        share = {"data_wait_share": min(1.0, sum(waits) / (seconds * len(pending)))} if waits else {}
        for step, values in fetched:
            rate = None
            if step != self._resume_step + 1:
                tokens = float(values["num_tokens"] or 0)
                rate = tokens / seconds
                self._rate_seconds += seconds
                self._rate_tokens += tokens
                self._rate_steps += 1
            measured = {"tokens_per_second": rate, "step_seconds": seconds, "mfu": self._mfu(rate)}
            self._last = {"step": step, "memory_gib": None, **values, **measured, **share}
            if self._is_main:
                self._write(self._last)

    def write_again(self) -> None:
        """Write metrics.jsonl again with every row, if it was removed. The open file still has them."""
        if self._is_main and not self._path.exists():
            self._file.seek(0)
            rows = self._file.read()
            self._file.close()
            self._file = open_own(self._path, "a+")
            self._file.write(rows)

    def close(self, *, succeeded: bool = True) -> None:
        """Flush, and close file, display and trackers. Also called after a failed run."""
        self.flush()
        if self._is_main:
            self._display.close()
            self._file.close()
            for tracker in self._trackers:
                with tracker_errors(tracker, "finish"):
                    tracker.finish(succeeded)

    def _mfu(self, rate: float | None) -> float | None:
        machine = self._machine
        return model_flops_utilisation(machine.flops_per_token, rate, machine.num_ranks, machine.peak_flops)

    def _time_left(self) -> float | None:
        if not self._rate_steps:
            return None
        return (self._num_steps - self._last_step) * self._rate_seconds / self._rate_steps

    def _write(self, row: Row) -> None:
        try:
            self._file.write(to_line(row))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # closing writes the remaining rows once more
                self._file.close()
            path = Path(self._file.name)
            raise RunError(
                f"{path} cannot be written: {error.strerror}. Existing checkpoints are complete",
                code="disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable_file",
                keys=("output_dir",),
                fix=f"free space on this disk, then automodel resume {word(path.parent)}",
            ) from error
        for tracker in self._trackers:
            with tracker_errors(tracker, "log"):
                tracker.log(row, int(row["step"] or 0))


def _fetch(values: Mapping[str, Scalar]) -> dict[str, float | int | None]:
    """Convert tensors to Python numbers."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
