"""`plan -c CONF --gpus N`: what a run would hold, need and wait for, without a GPU and without weights."""

from __future__ import annotations

from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.trust import Need, Trust


@click.command(short_help="Stages, memory and idle time of a run; nothing is run.")
@click.option("--gpus", required=True, type=click.IntRange(min=1), metavar="N", help="GPUs of the whole run.")
@click.option(
    "--memory-gib", default=80.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="Of one GPU."
)
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the pipeline's timeline here.")
@common.config_options
def plan(conf: str, overrides: tuple[str, ...], trust: Trust, gpus: int, memory_gib: float, svg: Path | None) -> int:
    """Print stages, memory of a GPU, the schedule's timeline and every other schedule, from the model's config alone.

    Memory is an estimate. Loads torch, starts no process.
    """
    untrusted: list[Need] = []
    composed, recipe = common.load_recipe(conf, overrides, trust, untrusted=untrusted)
    common.say_untrusted(composed, untrusted)
    from automodel_cli.run.plan import print_plan

    return print_plan(recipe, composed, num_gpus=gpus, memory_gib=memory_gib, svg=svg)
