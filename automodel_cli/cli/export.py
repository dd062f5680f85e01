"""`export RUN`: what the run learnt, as `transformers` loads it."""

from __future__ import annotations

from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.trust import Trust


@click.command(short_help="Write a run for transformers, and verify it.")
@click.argument("run", metavar="RUN")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write; default RUN/export.")
@common.checkpoint_option
@common.trust_option
def export(run: str, out: Path | None, trust: Trust, checkpoint: str | None) -> int:
    """Write a checkpoint of a run as a Hugging Face folder and verify it by reloading.

    RUN is a folder or a name below runs/. Without --checkpoint the newest is written, or the best one of a run with
    early stopping (`validation.patience`).
    """
    folder = common.run_folder(run, "checkpoint")
    _, recipe = common.load_recipe(folder / "config.yaml", (), trust, run_dir=folder)
    from automodel_cli.run.results import export_run

    return export_run(recipe, folder, out or folder / "export", checkpoint)
