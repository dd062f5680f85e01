"""`push RUN HUB-ID`: the export with a model card, on the hub. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

import click

from automodel_cli.cli import common, completion_values, table_rendering
from automodel_cli.config.errors import ConfigError

_ID = re.compile(r"[\w.-]+/[\w.-]+")


@click.command()
@click.argument("run", metavar="RUN", shell_complete=completion_values.runs)
@click.argument("repository", metavar="OWNER/NAME")
@common.checkpoint_option
@click.option("--private", is_flag=True, help="If the repository is new, make it private.")
@click.option("--license", "licence", metavar="ID", help="License of the model, for example apache-2.0.")
@click.option("--dry-run", is_flag=True, help="Print the card and the files. Upload nothing, and use no network.")
def push(run: str, repository: str, checkpoint: str | None, private: bool, licence: str | None, dry_run: bool) -> None:
    """Upload a run's export to the Hugging Face hub.

    Uploads weights, tokenizer, config, and a model card with data, scores and loss curve. First log in with `hf auth
    login`, or set HF_TOKEN. Read the card with --dry-run before you publish it, because it names your files.

    With --checkpoint, RUN/exports/step-NNNNNN is written first if it is missing.
    """
    if not _ID.fullmatch(repository):
        message = f"{repository} must have the form owner/name"
        raise ConfigError(message, code="invalid_value", keys=("REPOSITORY",), fix=f"your-name/{repository}")
    folder = common.run_folder(run, "export", *common.with_checkpoints(checkpoint))
    export = common.exported_checkpoint(folder, checkpoint)
    from automodel_cli.runs.index import RunEntry
    from automodel_cli.runs.push import staged, upload

    with staged(RunEntry(folder), export, licence=licence, base_model=_base(folder)) as files:
        if dry_run:
            click.echo((files / "README.md").read_text(encoding="utf-8"))
            for path in sorted(p for p in files.rglob("*") if p.is_file()):
                click.echo(f"{table_rendering.size_text(path.stat().st_size):>12}  {path.relative_to(files)}")
            click.echo(f"nothing was sent; without --dry-run it goes to {repository}")
            return
        click.echo(f"pushed to {upload(files, repository, private=private)}")


def _base(folder: Path) -> str | None:
    """Return the hub id of the base model. None for a local folder, which is not available to others."""
    from automodel_cli.config.composition.compose import compose

    name = compose(folder / "config.yaml", run_dir=folder).tree.get("model", {}).get("pretrained")
    return name if isinstance(name, str) and _ID.fullmatch(name) and not Path(name).exists() else None
