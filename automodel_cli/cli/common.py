"""What every command that reads a config shares: its options, and the way from a file to a checked recipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import click

from automodel_cli.cli import complete
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.problems import Finding, show
from automodel_cli.config.remembered import recall
from automodel_cli.config.trust import WORDS, Need, Trust
from automodel_cli.launch.placement import detect

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed

_PACKAGES = "automodel.trust-package"
F = TypeVar("F", bound=Callable[..., object])


@runtime_checkable
class Recipe(Protocol):
    """What the root of a config must be. Exit codes are those of `automodel_cli.cli.main`."""

    def num_ranks(self, num_gpus: int) -> int:
        """How many ranks to start on a host with so many GPUs."""
        ...

    def check_ranks(self, num_ranks: int) -> None:
        """Whether a run on so many ranks, of one host or several, is possible. Raises ConfigError."""
        ...

    def missing_files(self) -> Sequence[ConfigError]:
        """What the config names on this disk and is not there; each error names its key."""
        ...

    def run_folder(self, composed: Composed, *, make: bool) -> Path:
        """Where a run that begins later will write; with `make` the folder exists then, with its config."""
        ...

    def run(self, composed: Composed) -> int:
        """Train, as one rank; returns the exit code. `composed.run_dir` is set when a run goes on in place."""
        ...

    def inspect_data(self, composed: Composed, *, rows: int) -> int | None:
        """Print rows as the model will see them; returns the exit code, None for 0."""
        ...

    def plan(self, composed: Composed, *, num_gpus: int, memory_gib: float, svg: Path | None) -> int:
        """Print what a run on so many GPUs would hold, need and wait for; returns the exit code."""
        ...

    def verify(self, composed: Composed, *, wanted: Sequence[str], tolerance: float, as_json: bool) -> int:
        """Compare the recipe's layouts with one process on small CPU ranks; returns 0 where all agree, else 1."""
        ...

    def examine(self, run_dir: Path) -> Iterable[Finding]:
        """Whether the files of a run are as they were written."""
        ...

    def export(self, run_dir: Path, out_dir: Path) -> int:
        """Write the newest checkpoint of a run for `transformers`; returns the exit code."""
        ...


@runtime_checkable
class KindOfRecipe(Protocol):
    """A recipe that says which method it trains by."""

    @property
    def kind(self) -> str:
        """sft, dpo, ..."""
        ...


def trust_option(function: F) -> F:
    """`--trust WHAT` and `--trust-package NAME`, both repeatable, as one argument `trust`."""
    packages = click.option(
        "--trust-package",
        multiple=True,
        metavar="NAME",
        expose_value=False,
        is_eager=True,  # before `--trust`, which takes it up
        callback=lambda context, _, names: context.meta.update({_PACKAGES: names}),
        help="Let the config name classes and functions of this package too.",
    )
    words = click.option(
        "--trust",
        multiple=True,
        type=click.Choice(WORDS),
        callback=lambda context, _, words: Trust(frozenset(words), context.meta[_PACKAGES]),
        help="Let the config start a command, or run Python code that comes with a model.",
    )
    return words(packages(function))


def override_arguments(function: F) -> F:
    """`[key=value ...]` in Hydra's grammar."""
    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete.overrides)(function)


def config_options(function: F) -> F:
    """`-c CONF [--trust WHAT] [--trust-package NAME] [key=value ...]`."""
    conf = click.option(
        "-c",
        "--conf",
        required=True,
        metavar="CONF",
        shell_complete=complete.configs,
        help="A .yaml file, or the name of a bundled recipe.",
    )
    return conf(trust_option(override_arguments(function)))


def load(
    conf: str | Path,
    overrides: Sequence[str],
    trust: Trust,
    *,
    run_dir: Path | None = None,
    untrusted: list[Need] | None = None,
) -> tuple[Composed, Recipe]:
    """Compose and check. Raises ConfigError with everything that is wrong; what the config would execute without being
    trusted is part of that, or goes to `untrusted` (see `check`). A run in `run_dir` remembers what was trusted."""
    from automodel_cli.config.check import check
    from automodel_cli.config.compose import compose

    try:
        composed = compose(conf, overrides, run_dir=run_dir)
        composed = replace(composed, trust=trust | recall(run_dir) if run_dir is not None else trust)
        recipe = check(composed, composed.trust, untrusted)
    except ConfigError as error:
        if detect().rank > 0:  # every rank has found the same: rank 0 speaks, and is given the time to
            time.sleep(2)
            sys.exit(error.exit_code)
        raise
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"{type(recipe).__name__} is no recipe: it lacks {', '.join(_lacking(recipe))}",
            origin=f"_target_={composed.tree['_target_']} ({composed.origin('_target_')})",
        )
    return composed, recipe


def say_untrusted(composed: Composed, untrusted: Sequence[Need], width: int = 5) -> None:
    """One line for each value that this command has left alone and a run would execute, if it were trusted."""
    for need in untrusted:
        value = show(composed.shown(need.key), 100)
        label = click.style("trust".ljust(width), fg="yellow", bold=True)
        click.echo(f"{label}  {need.key}={value} ({composed.origin(need.key)}) {need.what}: a run needs {need.option}")


def _lacking(found: object) -> list[str]:
    """What `Recipe` asks for and `found` does not have."""
    return [name for name, member in vars(Recipe).items() if callable(member) and not hasattr(found, name)]


def run_folder(name: str) -> Path:
    """The folder of a run, given as a path or as a name below runs/. Raises ConfigError."""
    for path in (Path(name), Path("runs") / name):
        if (path / "config.yaml").is_file():
            return path.resolve()
    known = sorted((p.parent for p in Path("runs").glob("*/config.yaml")), key=lambda p: p.stat().st_mtime)
    raise ConfigError(f"no run at {name}: it has no config.yaml", fix=str(known[-1]) if known else None)
