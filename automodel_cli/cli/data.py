"""`data inspect`: rows as the model will see them."""

from __future__ import annotations

import click

from automodel_cli.cli import common
from automodel_cli.cli.convert_data import convert
from automodel_cli.config.trust import Trust


@click.group()
def data() -> None:
    """Inspect the data of a config, or convert data."""


@data.command()
@click.option(
    "--rows",
    metavar="N",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of sequences to print.",
)
@common.config_options
def inspect(conf: str, overrides: tuple[str, ...], trust: Trust, rows: int) -> None:
    """Print sequences with trained tokens in color, and totals."""
    _, recipe = common.load_recipe(conf, overrides, trust)
    from automodel_cli.run.commands.inspect_data import inspect_data

    inspect_data(recipe, rows=rows)


data.add_command(convert)
