"""`automodel data`: `inspect` shows rows as the model will see them, `prepare` tokenizes ahead of a run."""

from __future__ import annotations

import os

import click

from automodel_cli.cli import common
from automodel_cli.cli.convert_data import convert
from automodel_cli.cli.data_quality import quality
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Trust


@click.group()
def data() -> None:
    """Inspect, prepare, convert or check data."""


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


class ShardType(click.ParamType):  # type: ignore[type-arg]
    """A part of the data, as `I/N` with I from 0."""

    name = "shard"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        index, _, count = str(value).partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            self.fail(f"{value!r} must be I/N with 0 <= I < N, for example 0/8", param, ctx)
        return int(index), int(count)


@data.command()
@click.option(
    "--shard",
    metavar="I/N",
    type=ShardType(),
    help="Tokenize only part I of N, counted from 0. Default: the task of a Slurm array, or everything.",
)
@common.config_options
def prepare(conf: str, overrides: tuple[str, ...], trust: Trust, shard: tuple[int, int] | None) -> None:
    """Tokenize and pack the data ahead of a run.

    A killed preparation continues where it stopped. The process that completes the last part joins all parts. Runs with
    the same data settings then read the result.
    """
    _, recipe = common.load_recipe(conf, overrides, trust)
    index, count = shard or _array_task()
    from automodel_cli.run.commands.prepare_data import prepare_data

    prepare_data(recipe, index=index, count=count)


def _array_task() -> tuple[int, int]:
    """Return index and number of this task of a Slurm array, (0, 1) outside of one."""
    number = os.environ.get("SLURM_ARRAY_TASK_ID")
    if number is None:
        return 0, 1
    first, last, count = (int(os.environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("MIN", "MAX", "COUNT"))
    if last - first + 1 != count:
        raise ConfigError(
            f"the ids of the Slurm array must be consecutive, but {count} tasks have ids from {first} to {last}",
            code="invalid_value",
            fix=f"sbatch --array=0-{count - 1}",
        )
    return int(number) - first, count


data.add_command(convert)
data.add_command(quality)
