"""Run every task of an evaluation on every model, in one process group."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.distributed import process_group
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.evaluation import reporting
from automodel_cli.evaluation.config import EvalConfig, EvalTask
from automodel_cli.evaluation.eval_model import EvalModel
from automodel_cli.evaluation.scores import TaskScores
from automodel_cli.evaluation.task_errors import errors_of
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.run.checkpoint_selection import chosen_checkpoint
from automodel_cli.run.recipe import Recipe
from automodel_cli.training.checkpoint.directory import CheckpointDir, step_of
from automodel_cli.training.optimizers.rate_groups import HasGroups

BEFORE = "before"


@dataclass(frozen=True)
class Target:
    """A model to evaluate: the initial model of the recipe, or a checkpoint of a run."""

    label: str
    recipe: Recipe
    checkpoint: Path | None = None


def _run(name: str, task: EvalTask, candidate: EvalModel) -> TaskScores:
    with errors_of(f"tasks.{name}"):
        return task.run(candidate)


def eval_model_of_run(recipe: Recipe, run_dir: Path, choice: str | None = None) -> Target:
    """Return the trained model of a run: a checkpoint, or else its export. Raises RunError without both.

    Args:
        choice: see `chosen_checkpoint`.
    """
    if choice is not None or CheckpointDir(run_dir / "checkpoints").latest() is not None:
        chosen = chosen_checkpoint(run_dir, choice, prefers_best=recipe.validation.patience is not None)
        return Target(f"{run_dir.name} (step {step_of(chosen)})", recipe, chosen)
    if (run_dir / "export").is_dir():
        return Target(f"{run_dir.name} (export)", of_model(recipe, str(run_dir / "export")).recipe)
    raise RunError(
        f"{run_dir} has neither a checkpoint nor an export to evaluate",
        code="no_checkpoint",
        fix=f"automodel resume {word(run_dir)}",
    )


def before(recipe: Recipe) -> Target:
    """Return the initial model of a run."""
    return Target(BEFORE, recipe)


def of_model(recipe: Recipe, name: str) -> Target:
    """Another model, a hub id or a folder, under the layout of `recipe`."""
    model = replace(
        recipe.model, pretrained=name, config=None, gguf_file=None, revision=None, tokenizer=None, lora=None
    )
    optimizer = recipe.optimizer
    if isinstance(optimizer, HasGroups):
        optimizer = replace(optimizer, groups=[])
    train = replace(recipe.train, freeze=[], trainable=[])  # patterns name parameters of the recipe's model
    return Target(name, replace(recipe, model=model, train=train, optimizer=optimizer))


def evaluate(config: EvalConfig, targets: Sequence[Target], run_dir: Path, out: Path, config_yaml: str) -> int:
    """Evaluate every target, compare the first one with the others, print the scores, and write them to `out`.

    Returns the exit code. Collective: every rank of the layout calls it.
    """
    recipe = targets[0].recipe
    if recipe.train.num_cpu_threads is not None:
        torch.set_num_threads(recipe.train.num_cpu_threads)
    with process_group.process_group(recipe.parallelizer.backend) as device:
        mesh = build_mesh(recipe.mesh.resolve(dist.get_world_size()), device.type)
        is_main = dist.get_rank() == 0
        scores: dict[str, dict[str, TaskScores]] = {}
        for target in targets:
            tokenizer = load_tokenizer(target.recipe.model)
            candidate = EvalModel.build(target.label, target.recipe, mesh, tokenizer, run_dir, target.checkpoint)
            with candidate.at_exit:
                scores[target.label] = {name: _run(name, task, candidate) for name, task in config.tasks.items()}
            del candidate
            gc.collect()
        if is_main:
            reporting.report_results(scores, run_dir, out, config_yaml, config.num_resamples)
    return 0
