"""Which checkpoint of a run a command means: the best, the last, or that of a step; and its export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import RunError
from automodel_cli.config.fixes import word
from automodel_cli.run_folders.clean import EXPORTS
from automodel_cli.training.checkpoint_dir import META, CheckpointDir, step_of

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe

BEST, LAST = "best", "last"


def chosen_checkpoint(run_dir: Path, choice: str | None, *, prefers_best: bool = False) -> Path:
    """Return the folder of a whole checkpoint. `choice`: `best`, `last`, a step, or a checkpoint's name.

    None is the last one, or the best one where the run `prefers_best` and has it. Raises RunError.
    """
    folder = CheckpointDir(run_dir / "checkpoints")
    whole, best = folder.whole(), folder.best()
    if not whole:
        raise RunError(f"{run_dir} has no checkpoint", fix=f"automodel resume {word(run_dir)}")
    if choice is None:
        return best if prefers_best and best is not None else whole[-1]
    if choice == LAST:
        return whole[-1]
    if choice == BEST:
        if best is None:
            raise RunError(
                f"{run_dir} has no best checkpoint: none was written at a validation",
                keys=("validation.every", "checkpoint.every"),
                fix="--checkpoint last",
            )
        return best
    steps = {step_of(path): path for path in whole}
    wanted = int(number) if (number := choice.removeprefix("step-")).isdigit() else None
    if wanted in steps:
        return steps[wanted]
    known = sorted(step for step in steps if step is not None)
    near = min(known, key=lambda step: abs(step - wanted)) if wanted is not None else LAST
    raise RunError(
        f"{run_dir} has no checkpoint {choice!r}: it has those of the steps {', '.join(map(str, known))}",
        fix=f"--checkpoint {near}",
    )


def export_of(recipe: Recipe, run_dir: Path, choice: str) -> Path:
    """Return the checked export of a checkpoint, `RUN/exports/step-NNNNNN`, which is written where it is missing."""
    checkpoint = chosen_checkpoint(run_dir, choice)
    output = run_dir / EXPORTS / checkpoint.name
    written = output / "config.json"
    if not written.is_file() or written.stat().st_mtime < (checkpoint / META).stat().st_mtime:
        from automodel_cli.run.results import export_run

        export_run(recipe, run_dir, output, checkpoint.name)
    return output
