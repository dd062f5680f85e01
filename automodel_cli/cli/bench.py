"""`bench -c CONF` and `bench compare A B`: step times of configs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from automodel_cli.cli import common
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Trust

if TYPE_CHECKING:
    from automodel_cli.run.commands.bench import Config

_MEASURE = "measure"
_json = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures to this file."
)
_warmup = click.option(
    "--warmup",
    metavar="N",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Steps before the measurement.",
)
_steps = click.option(
    "--steps", metavar="N", default=20, show_default=True, type=click.IntRange(min=2), help="Measured steps."
)


class _Bench(click.Group):
    """`bench -c CONF ...` is `bench measure -c CONF ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = args[:1] and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if known else [_MEASURE, *args])


@click.group(cls=_Bench)
def bench() -> None:
    """Time the steps of a config, or of two configs alternately.

    `bench -c CONF` is short for `bench measure -c CONF`. Checkpoints, validations and callbacks are excluded. Only
    --json writes a file.
    """


@bench.command(_MEASURE)
@_warmup
@_steps
@_json
@common.config_options
def measure(
    conf: str, overrides: tuple[str, ...], trust: Trust, warmup: int, steps: int, json_file: Path | None
) -> int:
    """Time the steps of a config.

    Prints median and spread of the step time, tokens per second, memory, and a breakdown of one step.
    """
    config = _config(conf, overrides, trust)
    from automodel_cli.run.commands import bench as of_run

    return of_run.run_bench(config, warmup=warmup, steps=steps, json_file=json_file)


@bench.command()
@click.argument("confs", nargs=2, metavar="A B")
@_warmup
@_steps
@_json
@click.option(
    "--rounds",
    metavar="N",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="How often each config runs.",
)
@click.option("--a", "only_a", multiple=True, metavar="KEY=VALUE", help="Override of A only. Repeatable.")
@click.option("--b", "only_b", multiple=True, metavar="KEY=VALUE", help="Override of B only. Repeatable.")
@common.trust_option
@common.override_arguments
def compare(
    confs: tuple[str, str],
    overrides: tuple[str, ...],
    trust: Trust,
    only_a: tuple[str, ...],
    only_b: tuple[str, ...],
    **options: Any,
) -> int:
    """Time two configs alternately on the same data.

    Prints how many times as fast B is. A and B are two configs, or one config with different overrides: `--b
    parallelizer.enable_compile=true`.
    """
    first, second = (_config(c, (*overrides, *own), trust) for c, own in zip(confs, (only_a, only_b), strict=True))
    if first.arguments == second.arguments:
        raise ConfigError(
            "A and B are the same config", code="nothing_to_compare", keys=("--b",), fix="--b KEY=VALUE   (for B only)"
        )
    from automodel_cli.run.commands import bench as of_run

    return of_run.compare_configs(first, second, **options)


def _config(conf: str, overrides: tuple[str, ...], trust: Trust) -> Config:
    """Checked here, so that the error is printed before runs start."""
    from automodel_cli.run.commands.bench import Config

    composed, _ = common.load_recipe(conf, overrides, trust)
    allowed = [*(f"--trust={word}" for word in sorted(trust.words))]
    allowed += [f"--trust-package={package}" for package in trust.packages]
    return Config(" ".join((conf, *overrides)), ("-c", str(composed.path), *allowed, *overrides))
