"""An evaluation from its models to its files: every task on every model, in one process group."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.distributed import process_group
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.evaluation.candidate import Candidate
from automodel_cli.evaluation.config import EvalConfig
from automodel_cli.evaluation.outcome import REWARD, Outcome, interval, paired_difference
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.run.recipe import Recipe
from automodel_cli.runs.page import FILE, write_own_page
from automodel_cli.runs.record import code_version
from automodel_cli.training.checkpoint_dir import CheckpointDir, step_of

BEFORE = "before"


@dataclass(frozen=True)
class Target:
    """A model to judge: how the recipe begins it, or the newest checkpoint of the run in `run_dir`."""

    label: str
    recipe: Recipe
    checkpoint: Path | None = None


def of_run(recipe: Recipe, run_dir: Path) -> Target:
    """What a run has learnt: its newest checkpoint, else its export. Raises RunError where it has neither."""
    newest = CheckpointDir(run_dir / "checkpoints").latest()
    if newest is not None:
        return Target(f"{run_dir.name} (step {step_of(newest)})", recipe, newest)
    if (run_dir / "export").is_dir():
        return Target(f"{run_dir.name} (export)", of_model(recipe, str(run_dir / "export")).recipe)
    raise RunError(f"{run_dir} has neither a checkpoint nor an export to judge", fix=f"automodel resume {run_dir}")


def before(recipe: Recipe) -> Target:
    """What a run began with."""
    return Target(BEFORE, recipe)


def of_model(recipe: Recipe, name: str) -> Target:
    """Another model, a hub id or a folder, under the layout of `recipe`."""
    model = replace(
        recipe.model, pretrained=name, config=None, gguf_file=None, revision=None, tokenizer=None, lora=None
    )
    return Target(name, replace(recipe, model=model))


def evaluate(config: EvalConfig, targets: Sequence[Target], run_dir: Path, out: Path, config_yaml: str) -> int:
    """Judge every target and compare the first one with the others; print the scores, and write them to `out`.

    Returns the exit code. Collective: every rank of the layout calls it.
    """
    recipe = targets[0].recipe
    if recipe.train.cpu_threads is not None:
        torch.set_num_threads(recipe.train.cpu_threads)
    process_group_device = process_group.start(recipe.parallelizer.backend)
    try:
        mesh = build_mesh(recipe.mesh.resolve(dist.get_world_size()), process_group_device.type)
        is_main = dist.get_rank() == 0
        found: dict[str, dict[str, Outcome]] = {}
        for target in targets:
            tokenizer = load_tokenizer(target.recipe.model)
            candidate = Candidate.build(target.label, target.recipe, mesh, tokenizer, run_dir, target.checkpoint)
            with candidate.at_exit:
                found[target.label] = {name: task.run(candidate) for name, task in config.tasks.items()}
            del candidate
            gc.collect()
        if is_main:
            scores = list(_scores(config, found))
            _write(out, scores, found, config_yaml)
            _print(scores, out)
            if (run_dir / FILE).exists() and out.parent == run_dir / "eval":
                write_own_page(run_dir)
    finally:
        process_group.stop()
    return 0


def _scores(config: EvalConfig, found: dict[str, dict[str, Outcome]]) -> Any:
    """A line for each task, measure and model; then for each other model the paired difference to the first."""
    first, *others = found
    for name in config.tasks:
        for measure in found[first][name].measures:
            if measure == REWARD and all(map(_says_nothing_more, (found[label][name] for label in found))):
                continue
            for label in found:
                values = found[label][name].measures[measure]
                mean = sum(values) / len(values)
                low, high = interval(values, config.num_resamples)
                text = _text(measure)
                yield {
                    "task": f"{name}: {measure}",
                    "model": label,
                    "score": text(mean),
                    "interval": f"{text(low)} to {text(high)}",
                    "note": f"{len(values)} questions",
                }
            for label in others:
                yield _compared(config, name, measure, found[first][name], found[label][name], first, label)


def _says_nothing_more(outcome: Outcome) -> bool:
    """Whether the rewards of a task are 0 and 1, so that their mean is the share of right answers."""
    shares = outcome.measures.get("accuracy", outcome.measures.get("pass@1"))
    return shares == outcome.measures[REWARD]


def _compared(
    config: EvalConfig, name: str, measure: str, ours: Outcome, theirs: Outcome, first: str, label: str
) -> dict[str, str]:
    a, b = ours.measures[measure], theirs.measures[measure]
    if len(a) != len(b):
        raise ConfigError(f"task {name} asked {len(a)} and {len(b)} questions: nothing to compare in pairs")
    mean, (low, high) = paired_difference(a, b, config.num_resamples)
    text = _text(measure, signed=True)
    verdict = "better" if low > 0 else "worse" if high < 0 else "no difference is sure"
    return {
        "task": f"{name}: {measure}",
        "model": f"{first} minus {label}",
        "score": text(mean),
        "interval": f"{text(low)} to {text(high)}",
        "note": f"paired: {verdict}",
    }


def _text(measure: str, *, signed: bool = False) -> Callable[[float], str]:
    sign = "+" if signed else ""
    if measure == REWARD:
        return lambda value: f"{value:{sign}.3f}"
    return lambda value: f"{100 * value:{sign}.1f}%"


def _write(out: Path, scores: list[dict[str, str]], found: dict[str, dict[str, Outcome]], config_yaml: str) -> None:
    """The results of one evaluation, whole or not at all. Values stand at full precision, a question each."""
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": code_version(),
        "interval": "95% percentile bootstrap over questions",
        "scores": scores,
        "models": {
            label: {name: {"measures": o.measures, "items": o.items} for name, o in tasks.items()}
            for label, tasks in found.items()
        },
        "config": config_yaml,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)


def _print(scores: list[dict[str, str]], out: Path) -> None:
    columns = ("task", "model", "score", "interval", "note")
    widths = {column: max(len(column), *(len(line[column]) for line in scores)) for column in columns}
    for line in ({column: column for column in columns}, *scores):
        print("  ".join(line[column].ljust(widths[column]) for column in columns).rstrip())
    print(f"written to {out}")
