"""Print the newest steps of a run and follow it while it trains. Torch-free."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator

from automodel_cli.runs.index import RunEntry
from automodel_cli.training.metrics.progress import show_number, step_label, step_text

_SECONDS = 1.0


def follow(run: RunEntry, count: int, *, wait: bool = True) -> Iterator[str]:
    """Yield the newest `count` rows as lines, then (with `wait`) new rows until the run ends.

    After a resume that removes and rewrites rows, those steps are printed again.
    """
    shown: list[dict[str, object]] = run.rows[:-count] if count else list(run.rows)
    while True:
        ended = not wait or run.state != "running"
        rows = run.rows
        start = next(
            (i for i, (a, b) in enumerate(zip(shown, rows, strict=False)) if a != b), min(len(shown), len(rows))
        )
        yield from (_line(run, row) for row in rows[start:])
        if ended:
            return
        shown = list(rows)
        time.sleep(_SECONDS)
        run = RunEntry(run.folder)


def _line(run: RunEntry, row: dict[str, float | int | None]) -> str:
    step = int(row["step"] or 0)
    label = step_label(step, run.num_steps) if run.num_steps else f"step {step}"
    if "loss" in row:
        environment = run.attempts[-1].get("environment", {}) if run.attempts else {}
        count = re.match(r"\d{1,6}(?= x)", environment.get("device", ""))
        num_ranks = int(count[0]) if count else 1
        unknown = {key: math.nan for key in ("loss", "grad_norm", "lr") if row.get(key) is None}
        complete = {"mfu": None, "memory_gib": None, "tokens_per_second": None, **row, **unknown}
        return f"{label}  {step_text(complete, num_ranks)}"
    return f"{label}  " + "  ".join(f"{key} {show_number(value)}" for key, value in row.items() if key != "step")
