"""`plan -c CONF --gpus N`: stages, memory and idle time of a run, without a GPU and without weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from automodel_cli.cli import common
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Need, Trust

F = TypeVar("F", bound=Callable[..., object])


def _of_goodput(name: str, *, default: float | None, help: str) -> Callable[[F], F]:
    """Declare a rate of `--goodput`."""
    kind = click.IntRange(min=0) if isinstance(default, int) else click.FloatRange(min=0)
    return click.option(name, type=kind, default=default, show_default=default is not None, metavar="N", help=help)


@click.command()
@click.option("--gpus", required=True, type=click.IntRange(min=1), metavar="N", help="Number of GPUs of the run.")
@click.option("--gpu", default="h100", show_default=True, type=click.Choice(common.GPUS), help="GPU type.")
@click.option(
    "--memory-gib",
    metavar="GIB",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of one GPU that torch can use.  [default: of the GPU type]",
)
@click.option(
    "--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the pipeline's timeline to this file."
)
@click.option("--traced", is_flag=True, help="Measure memory with a dry run of every stage. Exact, but slower.")
@click.option(
    "--goodput",
    is_flag=True,
    help="Print instead what failures, checkpoints and slow nodes leave of the throughput of a dry run.",
)
@click.option(
    "--scale",
    is_flag=True,
    help="Print instead the plan on 64 to 4,096 GPUs: step time, exposed communication and goodput.",
)
@_of_goodput("--jitter", default=0.0, help="With --scale: standard deviation of a node's step time, relative.")
@_of_goodput("--oversubscription", default=1.0, help="With --scale: of the network between groups of 32 nodes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="With --scale: write rows.")
@_of_goodput("--gpu-mtbf-hours", default=50_000.0, help="Mean hours between failures of one GPU. 0: none.")
@_of_goodput("--restart-minutes", default=10.0, help="From a failure to the first step on nodes that are there.")
@_of_goodput("--save-seconds", default=None, help="Time that a checkpoint stops training.  [default: by its size]")
@_of_goodput("--spare-nodes", default=0, help="Nodes that stand by.")
@_of_goodput("--repair-hours", default=24.0, help="Until a failed node stands by again.")
@_of_goodput("--slow-node-hours", default=0.0, help="Mean hours until a node turns slow. 0: never.")
@_of_goodput("--slow-for-hours", default=2.0, help="Until a slow node is replaced.")
@_of_goodput("--slow-factor", default=1.3, help="Step time of a slow node over that of others.")
@common.config_options
def plan(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    gpus: int,
    gpu: str,
    memory_gib: float | None,
    svg: Path | None,
    *,
    traced: bool,
    goodput: bool,
    scale: bool,
    json_file: Path | None,
    jitter: float,
    oversubscription: float,
    **rates: Any,
) -> int:
    """Print pipeline stages, memory per GPU, step time, timeline and schedules.

    Reads only the model's config, and needs no GPU. Memory and time are estimates. With --traced, memory is measured:
    the real step runs on fake CUDA tensors, as in `dryrun`. Loads torch. Without --traced, starts no process.
    """
    untrusted: list[Need] = []
    composed, recipe = common.load_recipe(conf, overrides, trust, untrusted=untrusted)
    common.print_untrusted(composed, untrusted)
    others = {"--goodput": goodput, "--traced": traced, "--svg": svg is not None}
    for other in (name for name, is_set in others.items() if scale and is_set):
        message = f"--scale and {other} cannot be combined"
        raise ConfigError(message, code="mutually_exclusive", keys=("--scale", other), fix=f"--scale, or {other}")
    gpus = common.gpus_to_train_on(recipe, gpus)
    if goodput:
        from automodel_cli.dryrun.goodput import Assumptions, print_goodput

        request = common.dry_run_request(composed, trust, gpus, gpu=gpu)
        return print_goodput(recipe, request, recipe.mesh.resolve(gpus), Assumptions(**rates))
    if scale:
        from automodel_cli.run.commands.plan_scale import print_scale

        return print_scale(recipe, gpus, gpu, memory_gib, json_file, (jitter, oversubscription), rates)
    for name, is_set in (("--json", json_file), ("--jitter", jitter), ("--oversubscription", oversubscription != 1)):
        if is_set:
            message = f"{name} requires --scale"
            raise ConfigError(
                message, code="requires_setting", keys=(name, "--scale"), fix=f"--scale, or remove {name}"
            )
    from automodel_cli.run.commands.plan import print_plan

    trace = None
    if traced:
        from automodel_cli.dryrun.command import traced_memory

        trace = partial(traced_memory, recipe, common.dry_run_request(composed, trust, gpus, gpu=gpu))
    return print_plan(recipe, composed, num_gpus=gpus, gpu=gpu, memory_gib=memory_gib, svg=svg, trace=trace)
