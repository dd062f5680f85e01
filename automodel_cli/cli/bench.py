"""`bench -c CONF` and `bench compare A B`: how long the steps of a config take on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from automodel_cli.cli import common
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.trust import Trust

if TYPE_CHECKING:
    from automodel_cli.run.bench import Config

_MEASURE = "measure"
_json = click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write figures here.")
_warmup = click.option("--warmup", default=5, show_default=True, type=click.IntRange(min=1), help="Steps before.")
_steps = click.option("--steps", default=20, show_default=True, type=click.IntRange(min=2), help="Steps measured.")


class _Bench(click.Group):
    """`bench -c CONF ...` is `bench measure -c CONF ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = args[:1] and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if known else [_MEASURE, *args])


@click.group(cls=_Bench, short_help="Time the steps of a config, or of two in turns.")
def bench() -> None:
    """Time the steps of a config on this machine: `bench -c CONF`, or of two configs in turns: `bench compare A B`.

    Checkpoints and validations are left out, as are the config's callbacks. Nothing is kept but what --json writes.
    """


@bench.command(_MEASURE)
@_warmup
@_steps
@_json
@common.config_options
def measure(
    conf: str, overrides: tuple[str, ...], trust: Trust, warmup: int, steps: int, json_file: Path | None
) -> int:
    """Time CONF: median and spread of a step, tokens per second, memory, and where one step's time goes."""
    config = _config(conf, overrides, trust)
    from automodel_cli.run import bench as of_run

    return of_run.bench(config, warmup=warmup, steps=steps, json_file=json_file)


@bench.command()
@click.argument("confs", nargs=2, metavar="A B")
@_warmup
@_steps
@_json
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="How often each is run.")
@click.option("--a", "only_a", multiple=True, metavar="KEY=VALUE", help="An override of A alone; repeatable.")
@click.option("--b", "only_b", multiple=True, metavar="KEY=VALUE", help="An override of B alone; repeatable.")
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
    """Time A and B in turns on the same rows, and say how many times as fast B is.

    A and B are configs, or the same one twice with overrides of each: `--b parallelizer.enable_compile=true`.
    """
    first, second = (_config(c, (*overrides, *own), trust) for c, own in zip(confs, (only_a, only_b), strict=True))
    if first.arguments == second.arguments:
        raise ConfigError("A and B are the same config", fix="--b KEY=VALUE, an override of B alone")
    from automodel_cli.run import bench as of_run

    return of_run.compare(first, second, **options)


def _config(conf: str, overrides: tuple[str, ...], trust: Trust) -> Config:
    """Checked here, where a refusal is read best."""
    from automodel_cli.run.bench import Config

    composed, _ = common.load_recipe(conf, overrides, trust)
    allowed = [*(f"--trust={word}" for word in sorted(trust.words))]
    allowed += [f"--trust-package={package}" for package in trust.packages]
    return Config(" ".join((conf, *overrides)), ("-c", str(composed.path), *allowed, *overrides))
