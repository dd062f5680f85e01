"""`import-config FILE`: another tool's config as one of ours."""

from __future__ import annotations

import re
from pathlib import Path

import click

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.importer_registry import TABLES


@click.command(name="import-config")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "slug",
    type=click.Choice(list(TABLES)),
    help="Tool that the config belongs to.  [default: detected from its keys]",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="OUT", help="File to write.  [default: print]")
@click.option(
    "--gpus",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of GPUs of the old run.",
)
@click.option(
    "--kind",
    type=click.Choice(["sft", "dpo", "kd", "grpo", "vlm", "dpo_vlm"]),
    help="Training method.  [default: detected from its keys]",
)
def import_config(file: Path, slug: str | None, output: Path | None, gpus: int, kind: str | None) -> None:
    """Translate a config of another tool.

    The result contains each key of FILE: translated, with its old value, or listed at the end with the reason why it
    has no counterpart. The top lists your open decisions: differences in behavior, and errors that `automodel check`
    finds. Defaults of the other tool that would change the loss are written out. Other tools count batch sizes per
    device, automodel per step: set --gpus to the number of GPUs of the old run.
    """
    from automodel_cli.config.importers.write import imported

    text = imported(file, slug=slug, gpus=gpus, kind=kind)  # type: ignore[arg-type]
    if output is None:
        click.echo(text, nl=False)
        return
    if output.suffix != ".yaml":
        fix = f"-o {output.with_suffix('.yaml')}"
        raise ConfigError(f"{output} must end in .yaml", code="unsupported_file_type", keys=("--output",), fix=fix)
    if output.exists():
        fix = f"-o {output.with_stem(output.stem + '_2')}"
        raise ConfigError(f"{output} exists already", code="file_exists", keys=("--output",), fix=fix)
    output.write_text(text, encoding="utf-8")
    num_left = len(re.findall(r"^#   \S", text, flags=re.M))
    left = f"   ({num_left} of its keys have no counterpart: the end of the file says why)" if num_left else ""
    click.echo(f"wrote {output}{left}\nnext  automodel check -c {word(output)}")
