"""metrics.jsonl: one JSON object a line, a public interface. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_cli.config.security.safe_files import read_regular, replace

Row = Mapping[str, float | int | None]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all complete rows of the file, in order; [] if it does not exist. A partial last line is skipped."""
    if not path.exists():
        return []
    rows = []
    for line in read_regular(path).split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        match row:
            case {"step": bool()}:
                continue
            case {"step": int()}:
                rows.append(row)
    return rows


def keep_rows_until(path: Path, step: int) -> None:
    """Remove rows of steps after `step`, and a line cut short: the continued run writes them again."""
    rows = read_metrics(path)
    if not path.exists():
        return
    replace(path, "".join(to_line(row) for row in rows if row["step"] <= step), durable=True)


def to_line(row: Row) -> str:
    """A row as its line. JSON has no infinity and no NaN: both become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
