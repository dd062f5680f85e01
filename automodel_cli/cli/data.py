"""`data inspect`: rows as the model will see them."""

from __future__ import annotations

import click

from automodel_cli.cli import common
from automodel_cli.config.trust import Trust


@click.group()
def data() -> None:
    """Look at the data of a config."""


@data.command()
@click.option("--rows", default=3, show_default=True, type=click.IntRange(min=1), help="How many rows to print.")
@common.config_options
def inspect(conf: str, overrides: tuple[str, ...], trust: Trust, rows: int) -> None:
    """Print rows with trained tokens coloured and the totals of supervised tokens."""
    _, recipe = common.load_recipe(conf, overrides, trust)
    from automodel_cli.run.inspect_data import inspect_data

    inspect_data(recipe, rows=rows)
