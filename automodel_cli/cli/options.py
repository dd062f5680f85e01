"""`options [SECTION]`: every key of a config, from the nodes' own annotations and docstrings. Imports no torch."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from automodel_cli.config.keys.reference import ReferenceNode


@click.command()
@click.argument("section", required=False, metavar="[SECTION]")
@click.option(
    "--markdown",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the reference pages (config.md and config/) into FOLDER.",
)
def options(section: str | None, markdown: Path | None) -> None:
    """List config keys with type, default and meaning.

    SECTION is a section (data), a key or part below it (model.lora), or an option of a group (megatron_fsdp).
    """
    from automodel_cli.config.keys.reference import nodes

    reference = nodes()
    if markdown is not None:
        _write_pages(reference, markdown)
        return
    chosen = _chosen(reference, section) if section else reference
    width = min(shutil.get_terminal_size().columns, 120)
    for node in chosen:
        title = click.style(node.path or "(the root)", bold=True)
        click.echo(f"{title}  {node.target.rpartition('.')[2]}{_how(node)}")
        for key in node.keys:
            default = f" = {key.default}" if key.default else " (required)"
            click.echo(f"  {click.style(key.name, fg='cyan')}{default}   {click.style(key.kind, dim=True)}")
            if key.text:
                click.echo(textwrap.indent(textwrap.fill(key.text, width - 6), "      "))
        click.echo()


def _write_pages(found: list[ReferenceNode], folder: Path) -> None:
    """Write the reference pages below `folder`, as docs/ has them."""
    from automodel_cli.config.keys.reference_pages import pages

    for name, text in pages(found).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _how(node: ReferenceNode) -> str:
    """How a node is chosen."""
    chosen = "".join(f"   {node.path}={option}" for option in node.options[:4])
    return chosen or (f"   {node.path}._target_={node.target}" if node.path else "")


def _chosen(found: list[ReferenceNode], section: str) -> list[ReferenceNode]:
    """The nodes of a section, or the one node whose key or option it is. Raises ConfigError."""
    exact = [n for n in found if n.path == section or n.path.startswith(f"{section}.")]
    exact = exact or [n for n in found if section in n.options or n.target.rpartition(".")[2] == section]
    if exact:
        return exact
    from dataclasses import replace

    keys = [(n, k) for n in found for k in n.keys if section in (k.name, k.name.rpartition(".")[2])]
    if keys:
        return [replace(n, keys=(k,)) for n, k in keys]
    names = {n.path for n in found if n.path} | {k.name for n in found for k in n.keys}
    near = difflib.get_close_matches(section, sorted(names), 1, 0.5)
    raise ConfigError(
        f"{section} is not a section or key",
        code="unknown_name",
        keys=(section,),
        fix=f"automodel options {near[0]}" if near else "automodel options",
    )
