"""Shared options of commands that read a config, and the conversion of a file to a checked recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from automodel_cli.cli import completion_values
from automodel_cli.config.diagnostics import Problem, format_value
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.trust import NOTHING, WORDS, Need, Trust
from automodel_cli.config.security.trust_store import load_trust
from automodel_cli.launch import rank_errors

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.dryrun.types import TraceRequest
    from automodel_cli.run.config_root import ConfigRoot
    from automodel_cli.run.recipe import Recipe

GPUS = ("h100", "h100-500w", "h200", "b200", "a100", "l40s")
"""GPUs of the dry run (`planning/hardware.py`)."""
_PACKAGES = "automodel.trust-package"
F = TypeVar("F", bound=Callable[..., object])


def trust_option(function: F) -> F:
    """Add `--trust WHAT` and `--trust-package NAME`, both repeatable, as one argument `trust`."""
    packages = click.option(
        "--trust-package",
        multiple=True,
        metavar="NAME",
        expose_value=False,
        is_eager=True,  # before `--trust`, which includes its values
        callback=lambda context, _, names: context.meta.update({_PACKAGES: names}),
        help="Allow the config to name classes and functions of this package. Repeatable.",
    )
    words = click.option(
        "--trust",
        multiple=True,
        type=click.Choice(WORDS),
        callback=lambda context, _, words: Trust(frozenset(words), context.meta[_PACKAGES]),
        help="Allow the config to start a command, or to run Python code that comes with a model. Repeatable.",
    )
    return words(packages(function))


def checkpoint_option(function: F) -> F:
    """`--checkpoint best|last|STEP` as the argument `checkpoint`."""
    return click.option(
        "--checkpoint",
        metavar="best|last|STEP",
        help="Checkpoint of the run.  [default: last; with early stopping: best]",
    )(function)


def with_checkpoints(checkpoint: str | None) -> tuple[Literal["checkpoint"], ...]:
    """Return the files to download from a URL in addition to the export."""
    return () if checkpoint is None else ("checkpoint",)


def exported_checkpoint(folder: Path, checkpoint: str | None) -> Path:
    """Return the folder with the export of a run, or of a selected checkpoint, which is exported if necessary."""
    if checkpoint is None:
        return folder / "export"
    from automodel_cli.run.checkpoint_export import export_of

    _, recipe = load_recipe(folder / "config.yaml", (), NOTHING, run_dir=folder)
    return export_of(recipe, folder, checkpoint)


def override_arguments(function: F) -> F:
    """`[key=value ...]` in Hydra's grammar."""
    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=completion_values.overrides)(
        function
    )


def config_options(function: F) -> F:
    """Add `-c CONF [--trust WHAT] [--trust-package NAME] [key=value ...]`."""
    conf = click.option(
        "-c",
        "--conf",
        required=True,
        metavar="CONF",
        shell_complete=completion_values.configs,
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
) -> tuple[Composed, ConfigRoot]:
    """Compose and check a config. Raises ConfigError with all errors. Untrusted values are errors, or are added to
    `untrusted` (see `check`). A run in `run_dir` restores its permissions."""
    from automodel_cli.config.check import check_config
    from automodel_cli.config.composition.compose import compose
    from automodel_cli.run.config_root import ConfigRoot

    with rank_errors.by_rank_0():
        composed = compose(conf, overrides, run_dir=run_dir)
        composed = replace(
            composed, trust=trust | load_trust(run_dir, composed.content) if run_dir is not None else trust
        )
        recipe = check_config(composed, composed.trust, untrusted)
    if not isinstance(recipe, ConfigRoot):
        raise ConfigError(
            f"_target_={composed.tree['_target_']} is not a recipe: {type(recipe).__name__} must inherit from "
            f"{ConfigRoot.__module__}.ConfigRoot",
            code="wrong_recipe",
            keys=("_target_",),
            origin=f"_target_={composed.tree['_target_']} ({composed.origin('_target_')})",
        )
    return composed, recipe


def load_recipe(*args: Any, **options: Any) -> tuple[Composed, Recipe]:
    """`load`, for commands that read the sections of a language model's recipe. Raises ConfigError."""
    from automodel_cli.run.recipe import Recipe

    composed, found = load(*args, **options)
    if not isinstance(found, Recipe):
        raise ConfigError(
            f"_target_={composed.tree['_target_']} is not supported by this command: {type(found).__name__} must "
            f"inherit from {Recipe.__module__}.Recipe",
            code="wrong_recipe",
            keys=("_target_",),
            origin=f"_target_={composed.tree['_target_']} ({composed.origin('_target_')})",
        )
    return composed, found


def refuse(composed: Composed, errors: Iterable[ConfigError]) -> None:
    """Raise one ConfigError with all of these, each with the place of its key."""
    problems = []
    for error in errors:
        key = error.keys[0]
        where = composed.nearest_origin(key)
        problems.append(Problem(error.code, key, error.message, where, f"{key} ({where})", error.fix))
    if problems:
        raise composed.error(problems)


def print_untrusted(composed: Composed, untrusted: Sequence[Need], width: int = 5) -> None:
    """Return one line for each untrusted value, which this command ignored and a run would execute."""
    for need in untrusted:
        value = format_value(composed.shown(need.key), 100)
        label = click.style("trust".ljust(width), fg="yellow", bold=True)
        click.echo(f"{label}  {need.key}={value} ({composed.origin(need.key)}) {need.what}: a run needs {need.option}")


def gpus_to_train_on(recipe: ConfigRoot, num_gpus: int) -> int:
    """Describe how many of a run's GPUs have a rank, and the use of the others."""
    servers, train_on = recipe.generation_servers(), recipe.gpus_to_train_on(num_gpus)
    if servers is not None and servers.gpus:
        size = f"{servers.number} server{'s' * (servers.number > 1)} of {servers.gpus} GPUs"
        where = "on the GPUs that train, in turns" if servers.colocated else f"on {servers.own_gpus} of {num_gpus} GPUs"
        click.echo(f"generation: {size}, {where}; the rest is of the {train_on} GPUs that train\n")
    return train_on


def dry_run_request(composed: Composed, trust: Trust, num_gpus: int, **options: object) -> TraceRequest:
    """Return the request of a dry run for this config, with `options` as in `Request`."""
    from automodel_cli.dryrun.types import TraceRequest

    words = {"trust_words": tuple(trust.words), "trust_packages": trust.packages}
    return TraceRequest(str(composed.path), composed.overrides, num_gpus, **words, **options)  # type: ignore[arg-type]


def run_folder(name: str, *fetched: Literal["checkpoint", "export"]) -> Path:
    """Return the folder of a run, given as a path, a name below runs/ or a URL. Raises ConfigError.

    Of a URL, its records are downloaded, and the parts named in `fetched`.
    """
    from automodel_cli.run.remote.remote_storage import fetch, is_url

    if is_url(name):
        return fetch(name, fetched)
    for path in (Path(name), Path("runs") / name):
        if (path / "config.yaml").is_file():
            return path.resolve()
    of_checkpoint = Path(name).parent
    if of_checkpoint.name == "checkpoints" and (of_checkpoint.parent / "config.yaml").is_file():
        raise ConfigError(
            f"{name} is a checkpoint. Name its run",
            code="run_not_found",
            fix=f"automodel export {word(of_checkpoint.parent)} --checkpoint {Path(name).name}",
        )
    known = sorted((p.parent for p in Path("runs").glob("*/config.yaml")), key=lambda p: p.stat().st_mtime)
    fix = str(known[-1]) if known else None
    raise ConfigError(f"{name} is not a run: it has no config.yaml", code="run_not_found", fix=fix)


def export_that_talks(folder: Path, checkpoint: str | None = None) -> Path:
    """The export of a run, which must be a model that generates. Raises RunError or ConfigError."""
    export = exported_checkpoint(folder, checkpoint)
    if not (export / "config.json").is_file():
        raise RunError(f"{folder} has no export", code="no_export", fix=f"automodel export {word(folder)}")
    kinds = json.loads((export / "config.json").read_bytes()).get("architectures") or []
    if any("Classification" in kind for kind in kinds):
        message = f"{folder} is not supported because it trained a classifier ({', '.join(kinds)})"
        raise ConfigError(message, code="wrong_model_kind")
    return export
