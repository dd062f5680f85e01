"""`finetune llm` and `resume`: check, then run in place or start the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from automodel_cli.cli import common
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import (
    local_launcher,
    malloc,
    process_context,
    process_startup,
    rank_errors,
    rank_process,
    safe_output,
    signals,
)

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.run.config_root import ConfigRoot


class ModelGroup(click.Group):
    """A group whose command `llm` need not be typed: `finetune -c CONF` and `finetune CONF` are `finetune llm -c
    CONF`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        if first in self.commands:  # a recipe may have the same name
            return super().parse_args(ctx, args)
        if first.endswith((".yaml", ".yml")) or first in bundled_recipes.recipe_names():
            args = ["llm", "-c", *args]
        elif first not in ctx.help_option_names and (first.startswith("-") or "=" in first):
            args = ["llm", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ModelGroup)
def finetune() -> None:
    """Train a model with the recipe that a config names.

    `finetune -c CONF` is short for `finetune llm -c CONF`.
    """


@finetune.command()
@common.config_options
@click.pass_obj
def llm(arguments: list[str], conf: str, overrides: tuple[str, ...], trust: Trust) -> int:
    """Train a language model.

    Starts the ranks that the mesh needs. Under torchrun or srun, this process is one of the ranks. On Ctrl-C or
    SIGTERM, the run saves a checkpoint at the end of the step and stops.
    """
    return _begin(arguments, conf, overrides, trust)


def _command_of_kind(name: str, kind: str, what: str) -> click.Command:
    """Return a command that accepts only recipes of a kind."""

    @click.command(name=name, help=f"{what}\n\nSame as `finetune llm`, but accepts only recipes of kind {kind}.")
    @common.config_options
    @click.pass_obj
    def begin(arguments: list[str], conf: str, overrides: tuple[str, ...], trust: Trust) -> int:
        return _begin_kind(kind, arguments, conf, overrides, trust)

    return begin


for _kind, _what in {
    "vlm": "Train a vision-language model on text and pictures.",
    "classifier": "Train a classifier of texts or tokens on labels or numbers.",
    "embedding": "Train an embedding model on queries and passages.",
}.items():
    finetune.add_command(_command_of_kind(_kind, _kind, _what))


def of_kind(kind: str, what: str) -> click.Group:
    """The group `automodel KIND` with its command `llm`, which insists on a recipe of that kind."""

    @click.group(name=kind, help=what, cls=ModelGroup)
    def group() -> None:
        pass

    group.add_command(_command_of_kind("llm", kind, what))
    return group


def _begin_kind(kind: str, arguments: list[str], conf: str, overrides: tuple[str, ...], trust: Trust) -> int:
    """Run a recipe of this kind. Raises ConfigError for another kind."""
    composed, recipe = common.load(conf, overrides, trust)
    if recipe.kind != kind:
        raise ConfigError(
            f"{conf} is not a {kind} recipe but a {type(recipe).__name__}",
            code="wrong_recipe",
            keys=("_target_",),
            origin=f"_target_={composed.tree['_target_']} ({composed.origin('_target_')})",
            fix=f"automodel finetune llm -c {word(conf)}, or a config that begins with `defaults: [{kind}, _self_]`",
        )
    return _begin(arguments, conf, overrides, trust)


def _begin(
    arguments: Sequence[str], conf: str | Path, overrides: tuple[str, ...], trust: Trust, run_dir: Path | None = None
) -> int:
    """Load the config and run it. A restarted rank continues its run with the saved config."""
    if (folder := rank_process.restarted_run()) is not None:
        conf, overrides, run_dir = folder / "config.yaml", (), folder
    composed, recipe = common.load(conf, overrides, trust, run_dir=run_dir)
    return start(composed, recipe, arguments)


pretrain = of_kind("pretrain", "Pretrain on text, from scratch or from a checkpoint.")
dpo = of_kind("dpo", "Train on preferences: pairs or single rated responses.")
rm = of_kind("rm", "Train a reward model on preference pairs.")
kd = of_kind("kd", "Distill a teacher's token distributions into a student.")
grpo = of_kind("grpo", "Train on the model's own samples with rewards.")


@click.command()
@click.argument("run", metavar="RUN")
@common.override_arguments
@common.trust_option
@click.pass_obj
def resume(arguments: list[str], run: str, overrides: tuple[str, ...], trust: Trust) -> int:
    """Continue a run from its newest checkpoint.

    RUN is a folder, a name below runs/, or a URL. Files that exist only at the URL are downloaded. Overrides change the
    run's config from now on.
    """
    folder = common.run_folder(run, "checkpoint")
    return _begin(arguments, folder / "config.yaml", overrides, trust, run_dir=folder)


def start(composed: Composed, recipe: ConfigRoot, arguments: Sequence[str]) -> int:
    """Run `recipe` as the rank that this process is, or start its ranks with the same command line."""
    safe_output.outlive_readers()
    num_gpus = process_context.num_gpus()
    place = process_context.detect()
    if place.kind != "local":
        with rank_errors.by_rank_0():
            recipe.check_ranks(place.world_size)
    if place.kind == "local":
        num_ranks = recipe.num_ranks(num_gpus)
        if num_ranks > 1 or recipe.max_restarts:
            return local_launcher.run(arguments, num_ranks=num_ranks, max_restarts=recipe.max_restarts)
    process_startup.share_cores()
    if recipe.grows_segments:
        process_startup.grow_segments()
    process_startup.disable_gc()
    if not rank_process.is_launched_rank():  # else `worker.begin` has done both
        rank_process.redirect_output()
        signals.install_handlers()
    if num_gpus == 0:
        malloc.keep_freed_memory()
    try:
        return recipe.run(composed)
    except BrokenPipeError as error:  # never of our output: click would end the process without a word
        message = f"the connection to a process or server was lost: {error}"
        raise RunError(message, code="server_unreachable") from error
