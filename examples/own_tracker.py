"""A tracker of your own: every row of numbers goes to a CSV file, as a spreadsheet reads it.

    automodel finetune llm -c quickstart \
        'logging.trackers=[{_target_: own_tracker.Spreadsheet, file: curve.csv}]' --trust-package own_tracker
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spreadsheet:
    """Writes `file` into the folder of the run: a line a number, as step, name and value."""

    file: str = "curve.csv"

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, Any]) -> _Sheet:
        return _Sheet(run_dir / self.file)


class _Sheet:
    def __init__(self, path: Path):
        self._file = path.open("a", newline="")  # a run that goes on appends
        self._lines = csv.writer(self._file)

    def log(self, row: Mapping[str, float | int | None], step: int) -> None:
        self._lines.writerows((step, name, value) for name, value in row.items() if value is not None)

    def finish(self, succeeded: bool) -> None:
        self._lines.writerow(("end", "succeeded", succeeded))
        self._file.close()
