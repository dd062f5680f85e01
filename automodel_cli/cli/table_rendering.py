"""Style of run tables. `rich` is imported when a table is printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from automodel_cli.config.plain_text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from automodel_cli.runs.index import RunEntry

_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}
_RIGHT = ("steps", "loss", "val loss", "age", "size")
_WIDE = 240
"""Width without a terminal. In a pipe, each run is one line."""


def state(run: RunEntry) -> Text:
    from rich.text import Text

    return Text(run.state, _STYLES.get(run.state, ""))


def metric(run: RunEntry) -> str:
    """Return the metrics that are more informative than the loss, if there are any."""
    for key in ("val_reward", "reward", "val_accuracy", "accuracy"):
        if (value := run.last(key)) is not None:
            return f"{key.replace('_', ' ')} {number(value)}"
    accuracy = run.record.get("numbers", {}).get("accuracy after")
    return f"accuracy {accuracy}" if accuracy else ""


def with_origin(text: str) -> Text:
    """Format `value` with its origin, dimmed."""
    from rich.text import Text

    value, _, origin = map(visible, text.partition("\n"))
    return Text.assemble(value, *([("  ", ""), (origin, "dim")] if origin else []))


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"


def size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    return made


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDE)
