"""`recipes ls | show | cp`: the shipped configs."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

import click

from automodel_cli.cli import completion_values
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word


@click.group()
def recipes() -> None:
    """List, print and copy bundled recipes."""


@recipes.command()
def ls() -> None:
    """List the bundled recipes."""
    names = bundled_recipes.recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        about = bundled_recipes.describe_recipe(name)
        click.echo(f"{click.style(f'{name:<{width}}', bold=True)}  {about.summary}")
        if about.fits_on:
            click.echo(f"{'':<{width}}  {click.style(f'Fits on: {about.fits_on}', dim=True)}")
    click.echo("\nRun one:  automodel finetune llm -c NAME        Make it yours:  automodel recipes cp NAME")


@recipes.command()
@click.argument("name", shell_complete=completion_values.names)
def show(name: str) -> None:
    """Print a bundled recipe."""
    click.echo(_path(name).read_text(encoding="utf-8"), nl=False)


@recipes.command()
@click.argument("name", shell_complete=completion_values.names)
@click.argument("target", required=False, type=click.Path(path_type=Path))
def cp(name: str, target: Path | None) -> None:
    """Copy a bundled recipe to a new file.

    TARGET defaults to NAME.yaml in this folder. Existing files are never overwritten.
    """
    source = _path(name)
    destination = target or Path(source.name)
    if destination.is_dir():
        destination /= source.name
    if destination.suffix != ".yaml":
        fix = f"{destination.with_suffix('.yaml')}"
        raise ConfigError(f"{destination} must end in .yaml", code="unsupported_file_type", fix=fix)
    if destination.exists():
        fix = f"automodel recipes cp {word(name)} {word(destination.with_stem(destination.stem + '_2'))}"
        raise ConfigError(f"{destination} exists already", code="file_exists", fix=fix)
    shutil.copyfile(source, destination)
    click.echo(f"wrote {destination}\nnext  automodel finetune llm -c {word(destination)}")


def _path(name: str) -> Path:
    stem = name.removesuffix(".yaml")
    if stem not in bundled_recipes.recipe_names():
        near = difflib.get_close_matches(stem, bundled_recipes.recipe_names(), 1, 0.5)
        fix = near[0] if near else "automodel recipes ls"
        raise ConfigError(f"{name} is not a bundled recipe", code="unknown_name", keys=(name,), fix=fix)
    return bundled_recipes.recipe_path(stem)
