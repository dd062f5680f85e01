"""`verify -c CONF`: whether the layouts of a recipe give one process's numbers, measured on this machine's CPU."""

from __future__ import annotations

import click

from automodel_cli.cli import common
from automodel_cli.config.trust import Trust


@click.command(short_help="Compare a recipe's layouts with one process, on CPU ranks.")
@click.option(
    "--rows",
    "wanted",
    multiple=True,
    metavar="WORDS",
    help='Only rows with all these words, as "pp2 packed"; repeatable.',
)
@click.option(
    "--tolerance",
    default=1e-5,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Largest relative difference of loss, gradient norm and every gradient.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the table goes to stderr.")
@common.config_options
def verify(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    wanted: tuple[str, ...],
    tolerance: float,
    as_json: bool,
) -> int:
    """Shrink the recipe's model and mesh, run every parallelism in it alone and together, packed and padded, and
    compare loss, gradient norm and every gradient with the plain library model in one process.

    Needs the model's config, not its weights, and no GPU. Exit code 1 if a row differs.
    """
    composed, recipe = common.load_recipe(conf, overrides, trust)
    from automodel_cli.run import verify as of_run

    return of_run.verify(recipe, composed, wanted=wanted, tolerance=tolerance, as_json=as_json)
