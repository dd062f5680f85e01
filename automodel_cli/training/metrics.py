"""metrics.jsonl: one JSON object a line, a public interface. Torch-free."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, float | int | None]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole rows of the file, in order; [] where there is none. A last line cut short by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def keep_rows_until(path: Path, step: int) -> None:
    """Remove rows of steps after `step`, and a line cut short: the continued run writes them again."""
    rows = read_metrics(path)
    if not path.exists():
        return
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(to_line(row) for row in rows if row["step"] <= step)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def to_line(row: Row) -> str:
    """A row as its line. JSON has no infinity and no NaN: both become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
