"""Where a run writes: a folder of its own, chosen once for all ranks."""

from __future__ import annotations

import re
from pathlib import Path

from automodel_cli.config.errors import RunError


def runs_called(output_dir: Path, name: str) -> list[Path]:
    """The folders of runs with this name, oldest first: `name`, `name-2`, `name-3`, ..."""
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    found = {}
    for path in output_dir.glob(f"{name}*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1] or 1)] = path
    return [found[number] for number in sorted(found)]


def new_run_folder(output_dir: Path, name: str) -> Path:
    """Make `output_dir/name`, or the first free `name-N`: a run never writes into another's folder."""
    number = 1
    while True:
        path = output_dir / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RunError(
                f"the run folder {path} cannot be made: {error.strerror}",
                keys=("output_dir",),
                fix="output_dir=a folder that you may write to",
            ) from error
