"""Options of commands that submit Slurm jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])


def cluster_options(*, required: bool) -> Callable[[F], F]:
    """Add the resources of a job as options. Nodes and GPUs are `required` or optional."""
    options = (
        click.option("--nodes", required=required, type=click.IntRange(min=1), metavar="N", help="Number of nodes."),
        click.option(
            "--gpus-per-node",
            required=required,
            type=click.IntRange(min=0),
            metavar="G",
            help="GPUs of each node, one rank each. 0: CPU ranks.",
        ),
        click.option(
            "--ranks-per-node",
            type=click.IntRange(min=1),
            metavar="R",
            help="With --gpus-per-node 0: CPU ranks of each node.",
        ),
        click.option(
            "--cpus-per-task",
            type=click.IntRange(min=1),
            metavar="C",
            help="CPU cores of each rank.  [default with GPUs: 4]",
        ),
        click.option("--partition", metavar="NAME", help="Slurm partition."),
        click.option("--account", metavar="NAME", help="Slurm account."),
        click.option("--time", metavar="LIMIT", help="Time limit: minutes, H:MM:SS or D-HH:MM:SS."),
        click.option(
            "--notice",
            default=300,
            show_default=True,
            type=click.IntRange(1, 65535),
            metavar="SECONDS",
            help="Time before the limit at which ranks save.",
        ),
        click.option(
            "--max-requeues",
            default=20,
            show_default=True,
            type=click.IntRange(min=0),
            metavar="N",
            help="How often a stopped job is requeued.",
        ),
        click.option(
            "--setup", multiple=True, metavar="LINE", help="Shell line to run before the ranks start. Repeatable."
        ),
        click.option(
            "--sbatch",
            "options",
            multiple=True,
            metavar="OPTION",
            help="Additional #SBATCH option, for example --qos=high. Repeatable.",
        ),
        click.option(
            "--image", metavar="IMAGE", help="Container image of the ranks. On Slurm, this needs the pyxis plugin."
        ),
    )

    return lambda function: functools.reduce(lambda command, option: option(command), reversed(options), function)
