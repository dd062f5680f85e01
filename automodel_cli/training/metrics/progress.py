"""How step lines reach the screen: a live line on a terminal, plain lines elsewhere. Torch-free."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Literal, Protocol, TextIO

from automodel_cli.config.plain_text import visible
from automodel_cli.training.metrics_file import Row

REASONS = ("num_groups", "num_zero_std_groups")
"""Columns that explain why a step of reinforcement learning has no update."""
_KNOWN = frozenset(
    {
        *REASONS,
        "step",
        "loss",
        "grad_norm",
        "lr",
        "num_label_tokens",
        "num_tokens",
        "tokens_per_second",
        "step_seconds",
        "mfu",
        "memory_gib",
        "data_wait_share",
    }
)
_SHOWN_WAIT = 0.05
_LEAD = {
    "reward": "reward",
    "response_length": "length",
    "entropy": "entropy",
    "token_mult_prob_error": "mismatch",
}
"""Columns that show the progress of reinforcement learning, with their labels. Its loss does not show it."""


class Display(Protocol):
    """Destination of lines. A line may quote a sample or an error of a reward, so control characters are escaped."""

    def step(self, step: int, text: str, seconds_left: float | None) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """One line a step, flushed: for logs and pipes."""

    def __init__(self, num_steps: int, stream: TextIO):
        self._num_steps, self._stream = num_steps, stream

    def step(self, step: int, text: str, seconds_left: float | None) -> None:
        left = "" if seconds_left is None or step == self._num_steps else f"  eta {show_duration(seconds_left)}"
        self.line(f"{step_label(step, self._num_steps)}  {text}{left}")

    def line(self, text: str) -> None:
        self._stream.write(visible(text) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to restore."""


class LiveDisplay:
    """One line that is redrawn in place, with a bar. Other lines scroll above it."""

    def __init__(self, num_steps: int, done: int, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=self._console, auto_refresh=False)
        self._task = self._progress.add_task("", total=num_steps, completed=done)
        self._running = False

    def step(self, step: int, text: str, seconds_left: float | None) -> None:
        if not self._running:
            self._progress.start()
            self._running = True
        left = "" if seconds_left is None else f"  eta {show_duration(seconds_left)}"
        self._progress.update(self._task, completed=step, description=visible(text + left), refresh=True)

    def line(self, text: str) -> None:
        self._console.print(visible(text), markup=False)

    def close(self) -> None:
        if self._running:
            self._progress.stop()
            self._running = False


def make_display(kind: Literal["auto", "live", "plain"], num_steps: int, done: int) -> Display:
    """`auto` is live exactly when standard output is a terminal."""
    stream = sys.stdout
    if kind == "live" or (kind == "auto" and stream.isatty()):
        return LiveDisplay(num_steps, done, stream)
    return PlainDisplay(num_steps, stream)


def step_label(step: int, num_steps: int) -> str:
    """`step  12/200`, aligned."""
    return f"step {step:>{len(str(num_steps))}}/{num_steps}"


def step_text(row: Row, num_ranks: int) -> str:
    """Format a metrics row. Null values and means of nothing are omitted; unknown columns come last under their names.
    Rewards and related columns come first. A step without an update has no loss.
    """
    lead = [f"{name} {show_number(row[key])}" for key, name in _LEAD.items() if key in row and not _is_nan(row[key])]
    loss, norm = row["loss"], row["grad_norm"]
    if _is_nan(loss):
        lead.append(f"no update{_why_none(row)}")
    else:
        lead.append(f"loss {show_number(loss)}  gnorm {show_number(norm)}")
    text = f"{'  '.join(lead)}  lr {show_rate(row['lr'])}"
    rate = row["tokens_per_second"]
    if rate is not None:
        text += f"  {show_count(rate)} tok/s" + (f" ({show_count(rate / num_ranks)}/rank)" if num_ranks > 1 else "")
    if row["mfu"] is not None:
        text += f"  MFU {row['mfu']:.0%}"
    if row["memory_gib"] is not None:
        text += f"  mem {row['memory_gib']:.1f} GiB"
    if (row.get("data_wait_share") or 0) >= _SHOWN_WAIT:
        text += f"  data wait {row['data_wait_share']:.0%}"
    rest = ((key, value) for key, value in row.items() if key not in _KNOWN and key not in _LEAD and not _is_nan(value))
    return text + "".join(f"  {key} {show_number(value)}" for key, value in rest)


def _why_none(row: Row) -> str:
    reward = row.get("reward")
    if reward is None:
        return ""
    if _is_nan(reward):
        return ": every sample was left out after an error"
    if row.get("num_zero_std_groups") == row.get("num_groups"):
        return ": no group had different rewards"
    return ": none of the samples is taken (objective.threshold, rollout.overlong.filter)"


def _is_nan(value: float | int | None) -> bool:
    return value is not None and math.isnan(value)


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Format `label   text` lines with one margin. Further lines of a text are indented to it."""
    width = max(8, *(len(label) for label, _ in rows)) + 1 if rows else 0
    lines = []
    for label, text in rows:
        first, *more = text.split("\n")
        lines += [f"{label:<{width}}{first}", *(" " * width + line for line in more)]
    return lines


def show_number(value: float | int | None) -> str:
    """Four significant digits, as a person writes them."""
    if value is None or not math.isfinite(value):
        return "n/a" if value is None else str(value)
    if isinstance(value, int) or value == 0:
        return str(value)
    return f"{value:.3f}" if 0.1 <= abs(value) < 1000 else f"{value:.3g}"


def show_rate(value: float | int | None) -> str:
    return "n/a" if value is None else f"{value:.2e}"


def show_count(value: float) -> str:
    """11.3k, 2.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def show_duration(seconds: float) -> str:
    """4m33s, 2h05m, 12s."""
    total = round(seconds)
    if total >= 3600:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 60}m{total % 60:02d}s" if total >= 60 else f"{total}s"
