"""Export of a selected checkpoint, written on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.run.checkpoint_selection import chosen_checkpoint
from automodel_cli.runs.clean import EXPORTS
from automodel_cli.training.checkpoint.directory import META

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe


def export_of(recipe: Recipe, run_dir: Path, choice: str) -> Path:
    """Return the checked export of a checkpoint, `RUN/exports/step-NNNNNN`. Write it if it is missing."""
    checkpoint = chosen_checkpoint(run_dir, choice)
    output = run_dir / EXPORTS / checkpoint.name
    written = output / "config.json"
    if not written.is_file() or written.stat().st_mtime < (checkpoint / META).stat().st_mtime:
        from automodel_cli.run.finalize import export_run  # imports torch, which an export that exists does not need

        export_run(recipe, run_dir, output, checkpoint.name)
    return output
