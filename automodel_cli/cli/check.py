"""`check -c CONF`: everything that is wrong with a config, or a line for each section."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, cast

import click

from automodel_cli.cli import common
from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Need, Trust

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.run.config_root import ConfigRoot


@click.command()
@common.config_options
@click.option("--resolved", is_flag=True, help="Print the composed config with the origin of every value instead.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Also dry-run the step on N GPUs.")
@click.option("--gpu", type=click.Choice(common.GPUS), help="GPU type for --gpus.  [default: h100]")
def check(
    conf: str, overrides: tuple[str, ...], trust: Trust, *, resolved: bool, gpus: int | None, gpu: str | None
) -> None:
    """Check a config without a GPU, the network or torch.

    Prints all errors at once, including missing files. If there are none, prints a line for each section and `ok`. Also
    reads the first rows of local data files: a column that no row has, or a warm-up longer than the run, is an error.

    With --gpus, one rank of each stage also runs its step as `dryrun` does. This checks that kernels support the shapes
    and that the step fits in memory.
    """
    from automodel_cli.config.composition.bundled_recipes import conf_dir, display

    if gpu is not None and gpus is None:
        message = f"--gpu {gpu} has no effect without --gpus"
        raise ConfigError(message, code="requires_setting", keys=("--gpu", "--gpus"), fix=f"--gpus 1 --gpu {gpu}")
    if resolved and gpus is not None:
        raise ConfigError(
            f"--resolved and --gpus {gpus} exclude each other: --resolved only prints the config",
            code="mutually_exclusive",
            keys=("--resolved", "--gpus"),
            fix="--resolved",
        )
    untrusted: list[Need] = []
    load = common.load if gpus is None else common.load_recipe
    composed, recipe = load(conf, overrides, trust, untrusted=untrusted)
    common.refuse(composed, recipe.missing_files())
    common.refuse(composed, recipe.data_problems())
    if resolved:
        click.echo(composed.to_yaml(), nl=False)
        return
    width = max(map(len, composed.tree))
    limit = max(40, shutil.get_terminal_size().columns - width - 2)
    for key, value in sorted(composed.public().items(), key=lambda item: item[0] != "_target_"):
        label = "recipe" if key == "_target_" else key
        click.echo(f"{click.style(label.ljust(width), bold=True)}  {_clip(_line(value), limit)}")
    common.print_untrusted(composed, untrusted, width)
    if gpus is not None:
        result = _dry_run(composed, recipe, trust, gpus, gpu or "h100")
        click.echo(f"{click.style('dry run'.ljust(width), bold=True)}  {result}")
    homes = (composed.path.parent, conf_dir())
    chain = [display(path) for path in reversed(composed.files) if path.parent in homes]
    groups = len(composed.files) - len(chain)
    files = " < ".join(chain) + (f" and {groups} group files" if groups else "")
    more = f", {len(overrides)} from the command line" if overrides else ""
    click.echo(f"{click.style('ok'.ljust(width), fg='green', bold=True)}  {files}{more}")


def _dry_run(composed: Composed, recipe: ConfigRoot, trust: Trust, gpus: int, gpu: str) -> str:
    """Run the step and return its result. Raises ConfigError for an invalid step, RunError for a failed one."""
    gpus = common.gpus_to_train_on(recipe, gpus)
    from automodel_cli.dryrun.command import check_step
    from automodel_cli.run.recipe import Recipe

    return check_step(cast(Recipe, recipe), common.dry_run_request(composed, trust, gpus, gpu=gpu))


def _line(value: object) -> str:
    """Format a section in one line: the class of its node, then the values that are set."""
    if not isinstance(value, dict):
        return format_value(value, 100)
    words = [str(value["_target_"]).rpartition(".")[2]] if "_target_" in value else []
    words += [f"{k}={format_value(v, 60)}" for k, v in value.items() if not k.startswith("_")]
    return " ".join(words) or "(defaults)"


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
