"""`plan -c CONF --gpus N`: what a run would hold, need and wait for, without a GPU and without weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.trust import Need, Trust


@click.command(short_help="Stages, memory and idle time of a run; nothing is run.")
@click.option("--gpus", required=True, type=click.IntRange(min=1), metavar="N", help="GPUs of the whole run.")
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Of one GPU, for torch; default: that of an 80 GB card, 79.1.",
)
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the pipeline's timeline here.")
@click.option("--traced", is_flag=True, help="Take memory from a dry run of every stage: exact to a tensor, slower.")
@common.config_options
def plan(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    gpus: int,
    memory_gib: float | None,
    svg: Path | None,
    *,
    traced: bool,
) -> int:
    """Print stages, memory of a GPU, the schedule's timeline and every other schedule, from the model's config alone.

    Memory is an estimate, or with --traced what the real step holds on fake CUDA tensors, as `dryrun` measures it.
    Loads torch; without --traced it starts no process.
    """
    untrusted: list[Need] = []
    composed, recipe = common.load_recipe(conf, overrides, trust, untrusted=untrusted)
    common.say_untrusted(composed, untrusted)
    gpus = common.gpus_to_train_on(recipe, gpus)
    from automodel_cli.run.plan import print_plan

    trace = None
    if traced:
        from automodel_cli.dryrun.command import traced_memory

        trace = partial(traced_memory, recipe, common.dry_run_request(composed, trust, gpus))
    return print_plan(recipe, composed, num_gpus=gpus, memory_gib=memory_gib, svg=svg, trace=trace)
