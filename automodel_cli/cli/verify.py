"""`verify -c CONF`: compare the layouts of a recipe with a single process, on this machine's CPU."""

from __future__ import annotations

import click

from automodel_cli.cli import common
from automodel_cli.config.security.trust import Trust


@click.command()
@click.option(
    "--rows",
    "wanted",
    multiple=True,
    metavar="WORDS",
    help='Run only cases with all these words, for example "pp2 packed". Repeatable.',
)
@click.option(
    "--tolerance",
    metavar="X",
    default=1e-5,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Largest relative difference of loss, gradient norm and every gradient.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout, and the table to stderr.")
@common.config_options
def verify(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    wanted: tuple[str, ...],
    tolerance: float,
    as_json: bool,
) -> int:
    """Compare every layout of a recipe with one process.

    Shrinks model and mesh, and runs each parallelism alone and combined, packed and padded, on CPU ranks. Compares
    loss, gradient norm and every gradient with the plain library model. Needs the model's config, but no weights and no
    GPU. Exits with 1 if a case differs.
    """
    composed, recipe = common.load_recipe(conf, overrides, trust)
    from automodel_cli.run.commands import verify as of_run

    return of_run.run_verify(recipe, composed, wanted=wanted, tolerance=tolerance, as_json=as_json)
