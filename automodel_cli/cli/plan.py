"""`plan -c CONF --gpus N`: stages, memory and idle time of a run, without a GPU and without weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.trust import Need, Trust


@click.command()
@click.option("--gpus", required=True, type=click.IntRange(min=1), metavar="N", help="Number of GPUs of the run.")
@click.option(
    "--memory-gib",
    metavar="GIB",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of one GPU that torch can use.  [default: 79.1, an 80 GB card]",
)
@click.option(
    "--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the pipeline's timeline to this file."
)
@click.option("--traced", is_flag=True, help="Measure memory with a dry run of every stage. Exact, but slower.")
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
    """Print pipeline stages, memory per GPU, timeline and schedules.

    Reads only the model's config, and needs no GPU. Memory is an estimate. With --traced, it is measured: the real step
    runs on fake CUDA tensors, as in `dryrun`. Loads torch. Without --traced, starts no process.
    """
    untrusted: list[Need] = []
    composed, recipe = common.load_recipe(conf, overrides, trust, untrusted=untrusted)
    common.print_untrusted(composed, untrusted)
    gpus = common.gpus_to_train_on(recipe, gpus)
    from automodel_cli.run.commands.plan import print_plan

    trace = None
    if traced:
        from automodel_cli.dryrun.command import traced_memory

        trace = partial(traced_memory, recipe, common.dry_run_request(composed, trust, gpus))
    return print_plan(recipe, composed, num_gpus=gpus, memory_gib=memory_gib, svg=svg, trace=trace)
