"""`sweep -c CONF key=a,b ...`: one run for each combination, one after another or as a Slurm job array. No torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from automodel_cli.cli import common, table_rendering
from automodel_cli.cli.cluster_options import cluster_options
from automodel_cli.cli.submit import fitted, job_of, warn_of_a_job_that_waits_forever
from automodel_cli.cli.sweep_points import (
    Point,
    check_own_keys,
    check_same_sweep,
    grid_points,
    point_of,
    remember,
    short_value,
    state_of,
)
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import signals, slurm, slurm_script
from automodel_cli.launch.local_launcher import safe_path

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.run.config_root import ConfigRoot


@click.command()
@click.option("--name", metavar="NAME", help="Folder of the sweep below runs/.  [default: sweep-CONF]")
@click.option(
    "--metric",
    default="val_loss",
    show_default=True,
    metavar="COLUMN",
    help="Column of metrics.jsonl by which runs are compared.",
)
@click.option("--maximize", is_flag=True, help="Larger values of the metric are better.")
@click.option(
    "--optuna",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let Optuna choose N runs, each from the results of earlier runs.",
)
@click.option("--dry-run", is_flag=True, help="Check all runs and print their commands. Start nothing.")
@click.option("--slurm", "on_slurm", is_flag=True, help="Submit a Slurm job array. Needs --nodes and --gpus-per-node.")
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --slurm: number of tasks that run at the same time.",
)
@cluster_options(required=False)
@common.config_options
def sweep(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    name: str | None,
    metric: str,
    maximize: bool,
    optuna: int | None,
    dry_run: bool,
    on_slurm: bool,
    at_once: int | None,
    **cluster: object,
) -> int:
    """Run CONF once for each combination of values.

    Values use Hydra's grammar: optimizer.lr=1e-5,3e-5 seed=range(0,3). Each run has a folder below runs/NAME, named
    after its values. All runs are checked before the first one starts. If you run the command again, finished runs are
    skipped and interrupted runs continue.
    """
    folder = Path("runs") / (name or f"sweep-{Path(conf).stem}")
    if optuna is not None:
        _check_cluster(False, at_once, cluster)
        if on_slurm:
            raise ConfigError(
                "--optuna is not supported with --slurm, because each run depends on the previous one",
                code="unsupported_combination",
                keys=("--optuna", "--slurm"),
                fix="leave --slurm out",
            )
        code, points = _search(folder, conf, overrides, trust, optuna, metric, maximize=maximize, dry_run=dry_run)
        return _print_result(code, points, metric, maximize)
    points = grid_points(folder, overrides)
    check_same_sweep(folder, conf, overrides)
    checked = [(point, *common.load(conf, point.overrides, trust)) for point in points]
    if dry_run and not on_slurm:
        for point in points:
            words = ["automodel", "finetune", "llm", "-c", conf, *trust.arguments()]
            click.echo(f"{state_of(point):<12} {' '.join(map(word, [*words, *point.overrides]))}")
        return 0
    _check_cluster(on_slurm, at_once, cluster)
    if on_slurm:
        return _submit(folder, conf, overrides, checked, at_once, cluster, dry_run=dry_run)
    remember(folder, conf, overrides)
    return _print_result(_run_all(points, conf, trust), points, metric, maximize)


def _print_result(code: int, points: Sequence[Point], metric: str, maximize: bool) -> int:
    if points:
        _table(points, metric, maximize)
    if code in signals.EXIT_CODES.values():
        click.echo("the same command goes on")
    return code


def _search(
    folder: Path,
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    num_trials: int,
    metric: str,
    *,
    maximize: bool,
    dry_run: bool,
) -> tuple[int, list[Point]]:
    """Run a search one trial after another, skipping finished ones. Returns exit code and runs."""
    from automodel_cli.cli.optuna_sweep import STUDY, Search, axes, corners
    from automodel_cli.runs.index import RunEntry

    check_own_keys(folder, overrides)
    found, fixed = axes(overrides)
    signature = (*overrides, f"metric={metric}", f"maximize={maximize}".lower())
    check_same_sweep(folder, conf, signature)
    for words in corners(found):
        common.load(conf, (*fixed, *words), trust)
    if dry_run:
        click.echo("\n".join(str(axis) for axis in found))
        return 0, []
    remember(folder, conf, signature)
    search = Search(folder, found, num_trials, maximize=maximize)

    def point(number: int, words: Sequence[str]) -> Point:
        return point_of(folder, number, words, (*fixed, *words))

    code = search.run(
        lambda number, words: _run_one(point(number, words), f"{number + 1}/{num_trials}", conf, trust),
        lambda number, words: RunEntry(point(number, words).folder).last(metric),
    )
    click.echo(f"study      optuna-dashboard {folder / STUDY}")
    return code, [point(number, words) for number, words in enumerate(search.trials())]


def _run_all(points: Sequence[Point], conf: str, trust: Trust) -> int:
    """Run one after another. A failure does not stop the others. Ctrl-C and stop signals end the sweep."""
    worst = 0
    for number, point in enumerate(points, 1):
        code = _run_one(point, f"{number}/{len(points)}", conf, trust)
        if code in signals.EXIT_CODES.values():
            return code
        worst = max(worst, code)
    return worst


def _run_one(point: Point, label: str, conf: str, trust: Trust) -> int:
    """Return the exit code of a run, 0 if it has finished or is already running."""
    skipped = {"finished": "finished already", "running": "runs already"}.get(state_of(point))
    click.echo(click.style(f"[{label}] {point.folder}  {skipped or ''}".rstrip(), bold=True))
    if skipped:
        return 0
    words = ["finetune", "llm", "-c", conf, *trust.arguments(), *point.overrides]
    return _child([sys.executable, *safe_path(), "-m", "automodel_cli", *words])


def _child(command: Sequence[str]) -> int:
    """Return the exit code of a run. A terminal's signal reaches it directly, and it gets time to save."""
    with subprocess.Popen(command) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def _table(points: Sequence[Point], metric: str, maximize: bool) -> None:
    """Sort by metric, best first. Runs without the metric come last."""
    from automodel_cli.runs.index import RunEntry

    runs = [(RunEntry(point.folder), point) for point in points if point.folder.is_dir()]
    measured = [(run.last(metric), run, point) for run, point in runs]
    measured.sort(key=lambda entry: (entry[0] is None, -(entry[0] or 0) if maximize else (entry[0] or 0)))
    names = list(dict.fromkeys(("loss", "val_loss", metric)))
    table = table_rendering.table("run", *(text.partition("=")[0] for text in points[0].swept), "state", "step", *names)
    for _, run, point in measured:
        values = (short_value(text.partition("=")[2]) for text in point.swept)
        numbers = (table_rendering.number(run.last(name)) for name in names)
        table.add_row(run.name, *values, table_rendering.state(run), str(run.step), *numbers)
    table_rendering.console().print(table)
    if measured:
        click.echo(f"all on one page:  automodel report {word(points[0].folder.parent)}")


def _check_cluster(on_slurm: bool, at_once: int | None, cluster: dict[str, object]) -> None:
    given = [name for name in ("nodes", "gpus_per_node") if cluster[name] is not None]
    if on_slurm and len(given) < 2:
        message, fix = "--slurm requires --nodes and --gpus-per-node", "--slurm --nodes 1 --gpus-per-node 8"
        raise ConfigError(message, code="requires_setting", keys=("--slurm", "--nodes", "--gpus-per-node"), fix=fix)
    if not on_slurm and (given or at_once):
        option = given[0].replace("_", "-") if given else "at-once"
        message = f"--{option} requires --slurm"
        raise ConfigError(message, code="requires_setting", keys=(f"--{option}", "--slurm"), fix="--slurm")


def _submit(
    folder: Path,
    conf: str,
    overrides: tuple[str, ...],
    checked: Sequence[tuple[Point, Composed, ConfigRoot]],
    at_once: int | None,
    cluster: dict[str, object],
    *,
    dry_run: bool,
) -> int:
    """One array task for each run that has not finished."""
    open_ones = [entry for entry in checked if state_of(entry[0]) not in ("finished", "running")]
    for _, _, recipe in open_ones:
        servers = recipe.generation_servers()
        if servers is not None and not servers.colocated:
            raise ConfigError(
                "rollout.engine.servers with placement=disaggregated is not supported by --slurm: its jobs "
                "have no nodes for generation servers",
                code="unsupported_combination",
                keys=("rollout.engine.servers", "rollout.placement"),
                fix="rollout.engine.servers=null rollout.engine.url=http://localhost:8000",
            )
    jobs = [job_of(c, conf, p.overrides, p.folder.resolve(), fitted(c, r, cluster)) for p, c, r in open_ones]
    if not jobs:
        click.echo("all runs have finished")
        return 0
    script = slurm.array_script(folder.name, jobs, at_once=at_once)
    if dry_run:
        click.echo(script, nl=False)
        return 0
    sbatch = slurm.find_sbatch()
    remember(folder, conf, overrides)
    from automodel_cli.run.run_directory import run_directory

    made = []
    for (point, composed, recipe), job in zip(open_ones, jobs, strict=True):
        is_new = not point.folder.exists()
        point.folder.mkdir(parents=True, exist_ok=True)
        run_directory(recipe, composed, make=True)
        (point.folder / slurm_script.SCRIPT).write_text(job.script())
        made += [point.folder] if is_new else []
    path = folder / slurm_script.SCRIPT
    path.write_text(script)
    try:
        number = slurm.send(sbatch, path)
    except ConfigError:
        for new in made:
            shutil.rmtree(new)
        raise
    click.echo(f"submitted  job array {number}: {len(jobs)} runs of {jobs[0].size}")
    click.echo(f"state      squeue -j {number}; automodel runs ls {word(folder)}")
    warn_of_a_job_that_waits_forever(number)
    return 0
