"""`export RUN`: write the model of a run in the format of `transformers`."""

from __future__ import annotations

from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.security.trust import Trust


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write.  [default: RUN/export]")
@common.checkpoint_option
@common.trust_option
def export(run: str, out: Path | None, trust: Trust, checkpoint: str | None) -> int:
    """Write a checkpoint as a Hugging Face folder and verify it.

    Verification reloads the folder. RUN is a folder, a name below runs/, or a URL. Without --checkpoint, exports the
    newest checkpoint, or the best one with early stopping (`validation.patience`).
    """
    folder = common.run_folder(run, "checkpoint")
    _, recipe = common.load_recipe(folder / "config.yaml", (), trust, run_dir=folder)
    from automodel_cli.run.finalize import export_run

    return export_run(recipe, folder, out or folder / "export", checkpoint)
