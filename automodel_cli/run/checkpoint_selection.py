"""Select a checkpoint of a run: best, last, or by step."""

from __future__ import annotations

from pathlib import Path

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.training.checkpoint.directory import CheckpointDir, step_of

BEST, LAST = "best", "last"


def chosen_checkpoint(run_dir: Path, choice: str | None, *, prefers_best: bool = False) -> Path:
    """Return the folder of a complete checkpoint. Raises RunError if there is none.

    Args:
        choice: `best`, `last`, a step, or the name of a checkpoint. None selects the last one, or the best one if
            `prefers_best` is set and the run has one.
    """
    folder = CheckpointDir(run_dir / "checkpoints")
    complete, best = folder.complete(), folder.best()
    if not complete:
        raise RunError(f"{run_dir} has no checkpoint", code="no_checkpoint", fix=f"automodel resume {word(run_dir)}")
    if choice is None:
        return best if prefers_best and best is not None else complete[-1]
    if choice == LAST:
        return complete[-1]
    if choice == BEST:
        if best is None:
            raise RunError(
                f"{run_dir} has no best checkpoint, because no checkpoint was saved at a validated step",
                code="no_checkpoint",
                keys=("validation.every", "checkpoint.every"),
                fix="--checkpoint last",
            )
        return best
    steps = {step_of(path): path for path in complete}
    requested = int(number) if (number := choice.removeprefix("step-")).isdigit() else None
    if requested in steps:
        return steps[requested]
    known = sorted(step for step in steps if step is not None)
    near = min(known, key=lambda step: abs(step - requested)) if requested is not None else LAST
    raise RunError(
        f"{run_dir} has no checkpoint {choice!r}; the step must be one of: {', '.join(map(str, known))}",
        code="no_checkpoint",
        keys=("--checkpoint",),
        fix=f"--checkpoint {near}",
    )
