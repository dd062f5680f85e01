"""`eval TARGET -c EVAL`: evaluate a run or a model on held-out rows, in comparison with its initial model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from automodel_cli.cli import common, completion_values
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import local_launcher, process_context, process_startup

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.evaluation.config import EvalConfig
    from automodel_cli.evaluation.runner import Target
    from automodel_cli.run.recipe import Recipe

_BEFORE = "before"


@click.command(name="eval")
@click.argument("target", metavar="RUN|MODEL", shell_complete=completion_values.runs)
@click.option("-c", "--conf", metavar="EVAL", help="A .yaml file, or the name of a bundled evaluation.")
@click.option(
    "--harness",
    metavar="TASK,...",
    help="Run these lm-evaluation-harness tasks on the export instead of EVAL. KEY=VALUE sets its options.",
)
@click.option("--include", type=click.Path(path_type=Path, exists=True), help="Folder with your own --harness tasks.")
@click.option("--harness-python", metavar="PYTHON", help="Python interpreter that has lm-eval.  [default: this one]")
@click.option(
    "--against",
    multiple=True,
    metavar=f"{_BEFORE}|RUN|MODEL",
    help="Also evaluate this model, and compare. Repeatable.  [default for a run: before]",
)
@click.option("--alone", is_flag=True, help="Compare with no other model.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the results.  [default: RUN/eval/EVAL.json]",
)
@common.checkpoint_option
@common.trust_option
@common.override_arguments
@click.pass_obj
def evaluate(
    arguments: list[str],
    target: str,
    checkpoint: str | None,
    conf: str | None,
    harness: str | None,
    include: Path | None,
    harness_python: str | None,
    overrides: tuple[str, ...],
    trust: Trust,
    against: tuple[str, ...],
    alone: bool,
    out: Path | None,
) -> int:
    """Evaluate a run or a model on held-out questions.

    Prints scores with confidence intervals. A run is evaluated at its newest checkpoint, or at the best one with early
    stopping, with its own layout and number of ranks. MODEL is a hub id or a folder. Overrides change EVAL. Comparisons
    are paired: both models answer the same questions.
    """
    if alone and against:
        message, fix = f"--alone and --against {against[0]} exclude each other", f"--against {against[0]}"
        raise ConfigError(message, code="mutually_exclusive", keys=("--alone", "--against"), fix=fix)
    if (conf is None) == (harness is None):
        code = "missing_key" if conf is None else "mutually_exclusive"
        message = "exactly one of -c EVAL and --harness TASKS is required"
        raise ConfigError(message, code=code, keys=("--conf", "--harness"), fix="-c quickstart")
    if harness is None and (include or harness_python):
        message, option = (
            "--include and --harness-python require --harness",
            "--include" if include else "--harness-python",
        )
        raise ConfigError(message, code="requires_setting", keys=(option, "--harness"), fix="--harness TASK,...")
    if checkpoint is not None and _folder(target) is None:
        message = f"--checkpoint {checkpoint} requires a run, but {target} is a model"
        raise ConfigError(message, code="no_checkpoint", keys=("--checkpoint",))
    if harness is not None:
        return _by_harness(target, checkpoint, harness, include, harness_python, overrides, against, out)
    assert conf is not None
    composed, config = load_evaluation(conf, overrides, trust)
    folder = _folder(target)
    if folder is None:
        _check_rows(target, config, conf)
    recipe = _recipe(target, folder, config, trust)
    if process_context.detect().kind == "local":
        num_ranks = recipe.num_ranks(process_context.num_gpus())
        if num_ranks > 1:
            return local_launcher.run(arguments, num_ranks=num_ranks)
    process_startup.share_cores()
    from automodel_cli.evaluation import runner

    first = runner.eval_model_of_run(recipe, folder, checkpoint) if folder else runner.of_model(recipe, target)
    names = () if alone else against or ((_BEFORE,) if folder else ())
    targets = [first, *(_other(name, recipe, folder, trust) for name in names)]
    run_dir = folder or Path.cwd()
    results = out or run_dir / "eval" / f"{composed.name}{_of(checkpoint)}.json"
    return runner.evaluate(config, targets, run_dir, results, composed.to_yaml())


def _of(checkpoint: str | None) -> str:
    """Return the suffix of a results file for a selected checkpoint."""
    return "" if checkpoint is None else f"-{checkpoint}"


def _by_harness(
    target: str,
    checkpoint: str | None,
    tasks: str,
    include: Path | None,
    python: str | None,
    overrides: tuple[str, ...],
    against: tuple[str, ...],
    out: Path | None,
) -> int:
    from automodel_cli.evaluation import reporting as results
    from automodel_cli.evaluation.lm_eval import Harness, options_of

    chosen = Harness(python or sys.executable, tuple(tasks.split(",")), include, options_of(overrides))
    chosen.check()
    folder = _folder(target)
    models = {target: _exported(target, checkpoint), **{name: _exported(name) for name in against}}
    scores = {name: chosen.run(model) for name, model in models.items()}
    run_dir = folder or Path.cwd()
    text = f"harness: {tasks}\n" + "".join(f"{name}: {value}\n" for name, value in chosen.options.items())
    results.report_results(
        scores, run_dir, out or run_dir / "eval" / f"harness{_of(checkpoint)}.json", text, num_resamples=2000
    )
    return 0


def _exported(name: str, checkpoint: str | None = None) -> str:
    """Return the path that `transformers` loads: the export of a run, or of a selected checkpoint."""
    if name == _BEFORE:
        message = "--against before is not supported with --harness, which reads exported models"
        raise ConfigError(
            message, code="unsupported_combination", keys=("--against", "--harness"), fix="--against MODEL"
        )
    folder = _folder(name)
    if folder is None:
        return name
    export = common.exported_checkpoint(folder, checkpoint)
    if not export.is_dir():
        raise ConfigError(f"{name} has no export", code="no_export", fix=f"automodel export {word(folder)}")
    return str(export)


def load_evaluation(conf: str, overrides: tuple[str, ...], trust: Trust) -> tuple[Composed, EvalConfig]:
    """Return an evaluation from a file or the bundled ones. Raises ConfigError."""
    from automodel_cli.config.check import check_config
    from automodel_cli.config.composition import bundled_recipes
    from automodel_cli.config.composition.compose import compose
    from automodel_cli.evaluation.config import EvalConfig

    known = bundled_recipes.conf_dir() / "eval" / f"{conf}.yaml"
    composed = compose(known if known.is_file() else conf, overrides)
    config = check_config(composed, trust, kind=EvalConfig)
    if not isinstance(config, EvalConfig):
        raise ConfigError(
            f"{conf} is not an evaluation but a {type(config).__name__}",
            code="wrong_recipe",
            keys=("--conf",),
            origin=f"_target_={composed.tree.get('_target_')} ({composed.origin('_target_')})",
            fix="-c quickstart   (bundled)",
        )
    return composed, config


def _folder(target: str) -> Path | None:
    """Return the run of the target, or None for a model."""
    for path in (Path(target), Path("runs") / target):
        if (path / "config.yaml").is_file():
            return path.resolve()
    return None


def _check_rows(target: str, config: EvalConfig, conf: str) -> None:
    """Raise for tasks on the held-out rows of a run if `target` is a model."""
    from automodel_cli.evaluation.config import Generation

    for name, task in config.tasks.items():
        if isinstance(task, Generation) and task.data is None:
            exported_by = _folder(str(Path(target).parent)) if Path(target).name == "export" else None
            own = f"'tasks.{name}.data={{path: <file>}}'"
            raise ConfigError(
                f"tasks.{name}.data is required because {target} is a model, which has no held-out rows",
                code="missing_key",
                keys=(f"tasks.{name}.data",),
                fix=own if exported_by is None else f"automodel eval {word(exported_by)} -c {word(conf)}",
            )


def _recipe(target: str, folder: Path | None, config: EvalConfig, trust: Trust) -> Recipe:
    if folder is not None:
        recipe = common.load_recipe(folder / "config.yaml", (), trust, run_dir=folder)[1]
        if recipe.score_head is not None:
            message = f"{folder} is not supported because it trained a classifier"
            raise ConfigError(message, code="wrong_model_kind")
        return recipe
    length = [f"data.seq_len={config.longest()}"] if config.longest() else []
    shows = any(getattr(task, "pictures", False) for task in config.tasks.values())
    return common.load_recipe(
        "vlm" if shows else "sft", [f"model.pretrained={target}", "data.path=none", *length], trust
    )[1]


def _other(name: str, recipe: Recipe, folder: Path | None, trust: Trust) -> Target:
    from automodel_cli.evaluation import runner

    if name == _BEFORE:
        if folder is None:
            message = f"--against {_BEFORE} requires a run, but a model was given"
            raise ConfigError(message, code="run_not_found", keys=("--against",), fix="--against MODEL")
        return runner.before(recipe)
    other: Any = _folder(name)
    if other is None:
        return runner.of_model(recipe, name)
    return runner.of_model(recipe, _exported(name))
