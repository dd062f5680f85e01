"""`dryrun -c CONF --gpus N`: the real step of a run at its real size on fake CUDA tensors, without a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.trust import Need, Trust

_ALL = "all-distinct"
_file = click.Path(path_type=Path, dir_okay=False)
_gigabytes = click.FloatRange(min=0, min_open=True)


@click.command(short_help="Memory, waits, kernels and time of the real step, without a GPU.")
@click.option("--gpus", required=True, type=click.IntRange(min=1), metavar="N", help="GPUs of the whole run.")
@click.option(
    "--rank", default="0", show_default=True, metavar=f"R|{_ALL}", help="Whose step: one rank, or each stage's."
)
@click.option("--gpu", default="h100", show_default=True, type=click.Choice(common.GPUS), help="Which GPU.")
@click.option("--json", "json_file", type=_file, help="Write the figures here.")
@click.option("--svg", type=_file, help="Write the pipeline's timeline here.")
@click.option(
    "--route", default="balanced", show_default=True, type=click.Choice(("balanced", "worst")), help="Routers."
)
@click.option("--document", type=click.IntRange(min=1), metavar="TOKENS", help="Length of documents in packed rows.")
@click.option("--data", is_flag=True, help="Take lengths of documents from the config's data; prepares it if need be.")
@click.option("--microbatches", type=click.IntRange(min=3), metavar="N", help="To run; default: enough to tell.")
@click.option("--node-gbs", type=_gigabytes, help="GB/s between GPUs of a machine, one way.  [default: the GPU's]")
@click.option(
    "--network-gbs", default=50.0, show_default=True, type=_gigabytes, help="GB/s of a GPU to other machines."
)
@click.option("--host-gbs", type=_gigabytes, help="GB/s to a machine's memory, one way.  [default: the GPU's]")
@click.option("--gpus-per-node", default=8, show_default=True, type=click.IntRange(min=1), help="GPUs of a machine.")
@click.option(
    "--changes",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Where it does not fit: dry-run the N changes of the config that promise most.",
)
@common.config_options
def dryrun(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    gpus: int,
    rank: str,
    json_file: Path | None,
    svg: Path | None,
    node_gbs: float | None,
    network_gbs: float,
    host_gbs: float | None,
    changes: int,
    **options: object,
) -> int:
    """Run the optimizer step of CONF as a rank would, on tensors that have shapes and no values, and say what it holds,
    waits for, sends and launches.

    Needs no GPU, no weights and, for models of bundled recipes, no network.
    """
    untrusted: list[Need] = []
    composed, recipe = common.load_recipe(conf, overrides, trust, untrusted=untrusted)
    common.say_untrusted(composed, untrusted)
    gpus = common.gpus_to_train_on(recipe, gpus)
    number = None if rank == _ALL else _number(rank, gpus)
    from automodel_cli.dryrun.command import dry_run

    links = {"network": network_gbs * 1e9, "node": node_gbs and node_gbs * 1e9, "host": host_gbs and host_gbs * 1e9}
    request = common.dry_run_request(composed, trust, gpus, rank=number or 0, **links, **options)
    return dry_run(recipe, request, every=number is None, changes=changes, json_file=json_file, svg=svg)


def _number(rank: str, gpus: int) -> int:
    if rank.isdecimal() and int(rank) < gpus:
        return int(rank)
    raise ConfigError(f"--rank {rank}: a number below --gpus {gpus} is expected, or {_ALL}", fix="--rank 0")
