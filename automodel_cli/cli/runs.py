"""`runs ls | show | tail | rollouts | diff | clean`: the runs in a folder. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from automodel_cli.cli import completion_values, table_rendering
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.plain_text import visible

if TYPE_CHECKING:
    from automodel_cli.runs.index import RunEntry
    from automodel_cli.runs.rollouts import Order

_run = click.argument("run", required=False, metavar="[RUN]", shell_complete=completion_values.runs)


@click.group()
def runs() -> None:
    """List, follow, compare and clean up runs."""


@runs.command()
@click.argument("folder", default="runs", metavar="[FOLDER|URL]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def ls(folder: str, as_json: bool) -> None:
    """List the runs in a folder or at a URL, newest last.

    FOLDER defaults to runs. URL names object storage.
    """
    from automodel_cli.run.remote.remote_storage import is_url
    from automodel_cli.runs.index import find_runs

    if is_url(folder):
        with TemporaryDirectory() as home:
            _list(_at_url(folder, Path(home)), folder, as_json)
    else:
        _list([(str(run.folder), run) for run in find_runs(Path(folder))], str(Path(folder)), as_json)


def _list(found: Sequence[tuple[str, RunEntry]], folder: str, as_json: bool) -> None:
    if as_json:
        for name, run in found:
            click.echo(json.dumps(run.as_json() | {"folder": name}))
        return
    if not found:
        click.echo(f"no runs in {folder}; begin one with: automodel finetune llm -c quickstart")
        return
    table = table_rendering.table("run", "recipe", "state", "steps", "loss", "val loss", "metric", "age")
    for name, run in found:
        of = f"/{run.num_steps}" if run.num_steps else ""
        numbers = (
            table_rendering.number(run.last("loss")),
            table_rendering.number(run.last("val_loss")),
            table_rendering.metric(run),
        )
        shown = name.removeprefix(folder.rstrip("/")).strip("/") or run.name
        table.add_row(
            shown, run.recipe, table_rendering.state(run), f"{run.step}{of}", *numbers, table_rendering.age(run.age)
        )
    table_rendering.console().print(table)


def _at_url(url: str, home: Path) -> list[tuple[str, RunEntry]]:
    """Return (URL, run) of each run at a URL. Only its records are downloaded, to `home`."""
    from automodel_cli.run.remote.remote_storage import records, runs_at
    from automodel_cli.runs.index import RunEntry, oldest_first

    found = {RunEntry(records(each, home / str(n)), is_copy=True): each for n, each in enumerate(runs_at(url))}
    return [(found[run], run) for run in oldest_first(found)]


@runs.command()
@_run
@click.option("--json", "as_json", is_flag=True, help="Print the record of the run as JSON.")
def show(run: str | None, as_json: bool) -> None:
    """Show the config, progress and results of a run.

    Without RUN: the newest run.
    """
    entry = _one(run)
    if as_json:
        click.echo(json.dumps({**entry.as_json(), "record": entry.record}, indent=1))
        return
    from automodel_cli.runs.show import details

    for label, text in details(entry):
        first, *more = text.split("\n")
        click.echo(f"{click.style(label.ljust(11), bold=True)} {first}")
        for line in more:
            click.echo(f"{'':<11} {line}")


@runs.command()
@_run
@click.option(
    "-n",
    "count",
    metavar="N",
    default=10,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of steps to print first.",
)
@click.option("--no-follow", is_flag=True, help="Do not wait for new steps.")
def tail(run: str | None, count: int, no_follow: bool) -> None:
    """Print the newest steps of a run and follow it.

    Without RUN: the newest run.
    """
    entry = _one(run)
    from automodel_cli.runs.tail import follow

    for line in follow(entry, count, wait=not no_follow):
        click.echo(line)
    click.echo(click.style(f"{entry.folder}: {type(entry)(entry.folder).state}", dim=True), err=True)


@runs.command()
@_run
@click.option(
    "-n",
    "count",
    metavar="N",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of samples to print.",
)
@click.option(
    "--order",
    default="newest",
    show_default=True,
    type=click.Choice(["newest", "best", "worst"]),
    help="Which samples to print.",
)
@click.option("--step", metavar="N|N:M", help="Only samples of these steps: 40, 40:60, 40: or :60.")
@click.option("--least", type=float, metavar="REWARD", help="Only samples with at least this reward.")
@click.option("--most", type=float, metavar="REWARD", help="Only samples with at most this reward.")
@click.option("--prompt", default="", metavar="TEXT", help="Only samples whose prompt contains this text.")
@click.option("--completion", default="", metavar="TEXT", help="Only samples whose response contains this text.")
@click.option("--trained", is_flag=True, help="Only samples used for training: no groups with equal rewards.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, as in rollouts.jsonl.")
def rollouts(
    run: str | None,
    count: int,
    order: Order,
    step: str | None,
    least: float | None,
    most: float | None,
    prompt: str,
    completion: str,
    trained: bool,
    as_json: bool,
) -> None:
    """Print generated samples with their rewards.

    Without RUN: the newest run.
    """
    from automodel_cli.runs import rollouts as samples

    selection = samples.RolloutFilter(_steps(step), least, most, prompt, completion, trained)
    samples_shown, total = samples.select(_one(run).folder, selection, count, order)
    for row in samples_shown:
        if as_json:
            click.echo(json.dumps(row, ensure_ascii=False))
            continue
        parts = "  ".join(f"{name} {table_rendering.number(value)}" for name, value in row["parts"].items())
        numbers = f"reward {table_rendering.number(row['reward'])} ({parts})  advantage {row['advantage']:+.2f}"
        end = f"{row['finish_reason']} after {row['num_tokens']} tokens"
        click.echo(click.style(visible(f"step {row['step']}  {numbers}  {end}  {row['origin']}"), bold=True))
        for name, error in row["errors"].items():
            click.echo(click.style(visible(f"{name}: {error}"), fg="red"))
        click.echo(click.style(visible(str(row["prompt"][-1]["content"])), dim=True))
        click.echo(visible(samples.conversation_text(row["completion"], row.get("turns"))) + "\n")
    if not as_json:
        click.echo(f"{len(samples_shown)} of {total:,} samples, {order} first")


def _steps(text: str | None) -> tuple[int | None, int | None]:
    """`40`, `40:60`, `40:` or `:60`."""
    first, colon, last = (text or ":").partition(":")
    try:
        begin, end = (int(part) if part else None for part in (first, last))
    except ValueError:
        message = f"--step {text} must be a step or a range of steps"
        raise ConfigError(message, code="invalid_value", keys=("--step",), fix="--step 40:60") from None
    return begin, end if colon else begin


@runs.command()
@click.argument("first", shell_complete=completion_values.runs)
@click.argument("second", shell_complete=completion_values.runs)
@click.option(
    "--tolerance",
    metavar="X",
    default=1e-3,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Relative difference from which losses count as different.",
)
def diff(first: str, second: str, tolerance: float) -> None:
    """Compare two runs.

    Prints differences in config, data, code and environment, and the step at which their losses diverge.
    """
    from automodel_cli.runs.compare import differences

    a, b = _one(first), _one(second)
    table = table_rendering.table("", "what", str(a.folder), str(b.folder))
    found = differences(a, b)
    for index, entry in enumerate(found):
        where = entry.where if index == 0 or found[index - 1].where != entry.where else ""
        table.add_row(
            where, entry.name, table_rendering.with_origin(entry.first), table_rendering.with_origin(entry.second)
        )
    console = table_rendering.console()
    if found:
        console.print(table)
    else:
        click.echo("nothing differs in config, data, code and environment")
    for run in (a, b):
        if not run.record:
            click.echo(f"{run.folder} has no record of its data, code and environment")
    for column in ("loss", "grad_norm", "reward"):
        if text := _parting(a, b, column, tolerance):
            click.echo(text)


@runs.command()
@click.argument("names", nargs=-1, metavar="[RUN|FOLDER]...", shell_complete=completion_values.runs)
@click.option("--yes", is_flag=True, help="Remove the files. Without it, they are only listed.")
@click.option("--last-checkpoint", is_flag=True, help="Also remove the last checkpoint of runs that have an export.")
@click.option("--empty", is_flag=True, help="Also remove runs that never took a step.")
def clean(names: tuple[str, ...], yes: bool, last_checkpoint: bool, empty: bool) -> None:
    """Remove leftovers and checkpoints that no run needs.

    Keeps the newest and the best checkpoint of each run, and skips runs that are in progress. Without --yes, only
    prints what it would remove. Keeps the last complete checkpoint of a run unless you set --last-checkpoint.
    """
    from automodel_cli.runs.clean import removable, remove
    from automodel_cli.runs.index import runs_named

    entries = runs_named(names or ("runs",))
    for run in (run for run in entries if run.state == "running"):
        click.echo(f"{run.folder} goes on: left alone")
    removals = [r for run in entries for r in removable(run, last_checkpoint=last_checkpoint, empty=empty)]
    if not removals:
        click.echo("nothing to remove")
        return
    table = table_rendering.table("path", "size", "why")
    for removal in removals:
        table.add_row(str(removal.path), table_rendering.size_text(removal.size), removal.why)
    table_rendering.console().print(table)
    total = table_rendering.size_text(sum(removal.size for removal in removals))
    if yes:
        remove(removals)
        click.echo(f"removed: {total}")
    else:
        click.echo(f"{total} would be freed; --yes removes it")


def _one(name: str | None) -> RunEntry:
    """Return the run with a name or folder, or the newest one. Raises ConfigError."""
    from automodel_cli.cli.common import run_folder
    from automodel_cli.runs.index import RunEntry, find_runs

    if name is not None:
        folder = run_folder(name)
        return RunEntry(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
    if not (found := find_runs(Path("runs"))):
        raise ConfigError("runs/ contains no run", code="run_not_found", fix="automodel runs show FOLDER")
    return found[-1]


def _parting(a: RunEntry, b: RunEntry, column: str, tolerance: float) -> str:
    from automodel_cli.runs.compare import parting

    difference = parting(a, b, column, tolerance)
    if difference is None:
        return ""
    label = click.style(f"{column:<10}", bold=True)
    if difference.unequal is None:
        return f"{label} the same number at all {difference.num_steps} steps that both have"
    apart = "never by more" if difference.apart is None else f"by more from step {difference.apart}"
    ends = [table_rendering.number(value) for value in difference.at_end]
    end = f"{ends[0]} and {ends[1]} at the last step that both have"
    return f"{label} parts at step {difference.unequal} ({apart} than {tolerance:g} of itself); {end}"
