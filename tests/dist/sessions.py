"""A real run inside a forked rank: what the command line would do, without the seconds that a new process costs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import signals


@contextmanager
def session(
    folder: Path, config: str, *overrides: str, run: str | None = None, trust: tuple[str, ...] = ()
) -> Iterator[Any]:
    """The session of `config` (YAML text) with its cache and runs below `folder`; `run` is the name of one to resume,
    `trust` are packages that lie in `folder`.

    Call it in a function for `launch(..., process_group=False)`.
    """
    from automodel_cli.recipes.grpo import GRPORecipe
    from automodel_cli.run.build_trainer import build_trainer
    from automodel_cli.run.validation_loss import HeldOutLoss

    os.chdir(folder)
    os.environ["AUTOMODEL_CACHE"] = str(folder / "cache")
    path = folder / "config.yaml"
    mine = folder / f".config-{os.environ['RANK']}"
    mine.write_text(config)
    mine.replace(path)  # whole at any moment: all ranks write it
    composed = compose(path, overrides, run_dir=folder / "runs" / run if run else None)
    signals.install_handlers()
    recipe = check_config(composed, Trust(packages=trust))
    with build_trainer(recipe, composed) as opened:
        if not isinstance(recipe, GRPORecipe):
            opened.callbacks.add(HeldOutLoss(opened))
        yield opened


def train(opened: Any, stop_at: int = 0) -> None:
    """All steps of a session; at step `stop_at` this rank is told to stop."""
    for step, batches in opened.steps():
        opened.train(step, batches)
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
