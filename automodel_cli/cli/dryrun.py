"""`dryrun -c CONF --gpus N`: the real step of a run at its real size on fake CUDA tensors, without a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from automodel_cli.cli import common
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Need, Trust

_ALL = "all-distinct"
_file = click.Path(path_type=Path, dir_okay=False)
_gigabytes = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--gpus", required=True, type=click.IntRange(min=1), metavar="N", help="Number of GPUs of the run.")
@click.option(
    "--rank", default="0", show_default=True, metavar=f"R|{_ALL}", help="Rank to run, or one rank of each stage."
)
@click.option("--gpu", default="h100", show_default=True, type=click.Choice(common.GPUS), help="GPU type.")
@click.option("--json", "json_file", type=_file, help="Write the figures to this file.")
@click.option("--svg", type=_file, help="Write the pipeline's timeline to this file.")
@click.option(
    "--route",
    default="balanced",
    show_default=True,
    type=click.Choice(("balanced", "worst")),
    help="Distribution of tokens over experts.",
)
@click.option(
    "--document", type=click.IntRange(min=1), metavar="TOKENS", help="Length of documents in packed sequences."
)
@click.option("--picture", metavar="WxH", help="Size of the picture that each document shows [pixels].")
@click.option(
    "--data", is_flag=True, help="Use documents and pictures as in the config's data. Prepares the data if necessary."
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=3),
    metavar="N",
    help="Number of microbatches to run.  [default: as few as necessary]",
)
@click.option(
    "--node-gbs",
    metavar="GB/S",
    type=_gigabytes,
    help="GB/s between GPUs of a node, one way.  [default: of the GPU type]",
)
@click.option(
    "--network-gbs",
    metavar="GB/S",
    default=50.0,
    show_default=True,
    type=_gigabytes,
    help="GB/s from a GPU to other nodes.",
)
@click.option(
    "--host-gbs",
    metavar="GB/S",
    type=_gigabytes,
    help="GB/s from a GPU to host memory, one way.  [default: of the GPU type]",
)
@click.option(
    "--gpus-per-node", metavar="N", default=8, show_default=True, type=click.IntRange(min=1), help="GPUs of a node."
)
@click.option(
    "--changes",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="If the step does not fit, dry-run the N most promising changes of the config.",
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
    """Run the real optimizer step without a GPU and print its costs.

    The step runs on fake CUDA tensors, which have shapes but no values. The output has memory, host synchronizations,
    communication and kernels of a rank, and an estimated step time. Needs no weights. For models of bundled recipes, it
    needs no network.
    """
    untrusted: list[Need] = []
    composed, recipe = common.load_recipe(conf, overrides, trust, untrusted=untrusted)
    common.print_untrusted(composed, untrusted)
    gpus = common.gpus_to_train_on(recipe, gpus)
    number = None if rank == _ALL else _number(rank, gpus)
    from automodel_cli.dryrun.command import dry_run

    links = {"network": network_gbs * 1e9, "node": node_gbs and node_gbs * 1e9, "host": host_gbs and host_gbs * 1e9}
    request = common.dry_run_request(composed, trust, gpus, rank=number or 0, **links, **options)
    return dry_run(recipe, request, every=number is None, changes=changes, json_file=json_file, svg=svg)


def _number(rank: str, gpus: int) -> int:
    if rank.isdecimal() and int(rank) < gpus:
        return int(rank)
    message = f"--rank {rank} must be a number below --gpus {gpus}, or {_ALL}"
    raise ConfigError(message, code="out_of_range", keys=("--rank", "--gpus"), fix="--rank 0")
