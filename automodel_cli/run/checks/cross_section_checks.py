"""Validation rules that involve several config sections. Torch-free, because `automodel check` runs them."""

from __future__ import annotations

import re
from pathlib import Path

from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.name_patterns import NameList, check_entries
from automodel_cli.data.config import DataConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.objectives.base import Objective
from automodel_cli.objectives.sources import uses_loss_weights
from automodel_cli.run.remote.remote_storage import check_url, is_url
from automodel_cli.training.config import ProfileConfig, ValidationConfig
from automodel_cli.training.early_stopping import LOSS
from automodel_cli.training.train_config import TrainConfig


def check_run_name(name: str | None) -> None:
    """Raise ConfigError if `name` is not a single path component of printable characters."""
    if name is None or re.fullmatch(r"[\w][\w .,+=@:~%()'\[\]-]{0,199}", name):
        return
    word = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100]
    raise ConfigError(
        f"run_name={name!r} is not a valid folder name: it must begin with a letter, digit or _ and have at most 200 "
        "letters, digits, spaces and characters of .,+=@:~%()'[]-_",
        code="invalid_value",
        keys=("run_name",),
        fix=f"run_name={word or 'my_run'}",
    )


def check_output_dir(folder: str) -> None:
    """Raise ConfigError if `folder` is a URL and its package is missing. Write access is tested when a run starts."""
    if is_url(folder):
        check_url(folder)


def check_mixture(data: DataConfig, objective: Objective, train: TrainConfig) -> None:
    """Raise ConfigError for loss weights that the objective does not read, and for a curriculum of unknown length."""
    mixture = data.mixture()
    scaled = [index for index, weight in enumerate(mixture.loss_weights) if weight != 1]
    if scaled and not uses_loss_weights(objective):
        key = f"data.datasets.{scaled[0]}.loss_weight"
        raise ConfigError(
            f"loss_weight={mixture.loss_weights[scaled[0]]:g} is not supported with {type(objective).__name__}, whose "
            "loss is not a sum over the tokens of a dataset",
            code="unsupported_combination",
            keys=(key,),
            fix=f"{key}=1.0",
        )
    if mixture.changes and train.max_steps is None:
        raise ConfigError(
            "sampling_weight by steps requires train.max_steps, because the number of steps of an epoch depends on it",
            code="requires_setting",
            keys=("data.datasets", "train.max_steps"),
            fix="train.max_steps=1000",
        )


def check_streaming(data: DataConfig, train: TrainConfig, kind: str) -> None:
    """Raise ConfigError for a recipe that cannot stream its data, and for a stream without a number of steps."""
    if data.streaming is None:
        return
    if kind not in ("sft", "pretrain"):
        raise ConfigError(
            f"data.streaming is not supported by recipes of kind {kind}, which need all rows before the first step",
            code="unsupported_combination",
            keys=("data.streaming",),
            fix="data.streaming=null",
        )
    if train.max_steps is None:
        raise ConfigError(
            "data.streaming requires train.max_steps, because the number of rows is unknown",
            code="requires_setting",
            keys=("data.streaming", "train.max_steps"),
            fix="train.max_steps=1000",
        )
    if train.epochs not in (None, 1):
        raise ConfigError(
            f"train.epochs={train.epochs:g} has no effect with data.streaming, whose epochs have no known length",
            code="no_effect",
            keys=("train.epochs", "data.streaming"),
            fix="train.epochs=null",
        )
    data.streaming.num_lanes(train.batch_sizes)


def check_ramp(train: TrainConfig, data: DataConfig, *, samples: bool) -> None:
    """Raise ConfigError for a batch-size ramp with rollouts, or with weights that change at given steps."""
    if train.batch_size_ramp is None:
        return
    changes = data.mixture().changes
    other = "rollouts" if samples else "data.datasets with sampling_weight by steps" if changes else None
    if other is not None:
        raise ConfigError(
            f"batch_size_ramp is not supported with {other}, because their steps have a fixed number of sequences",
            code="unsupported_combination",
            keys=("train.batch_size_ramp",),
            fix="train.batch_size_ramp=null",
        )


def check_validation(validation: ValidationConfig, data: DataConfig, kind: str = "sft") -> None:
    """Raise ConfigError if validation settings are set without validation data. Tasks bring their own questions."""
    times = () if validation.tasks else ("every", "at_start")  # tasks bring their own questions
    enabled = [name for name in (*times, "num_batches") if getattr(validation, name)]
    if enabled and not data.has_validation:
        key, value = f"validation.{enabled[0]}", format_value(getattr(validation, enabled[0]))
        raise ConfigError(
            f"{key}={value} requires validation rows, but no rows are held out",
            code="requires_setting",
            keys=(key,),
            fix="data.validation_size=0.02",
        )
    if validation.patience is None or validation.metric != LOSS:
        return
    if kind == "grpo":
        raise ConfigError(
            f"validation.patience={validation.patience} is not supported with validation.metric={LOSS}, because "
            "recipes that train on their own samples do not measure it",
            code="unsupported_combination",
            keys=("validation.patience", "validation.metric"),
            fix="validation.metric=val_reward validation.direction=max",
        )
    if not data.has_validation:
        raise ConfigError(
            f"validation.patience={validation.patience} requires {LOSS}, but no rows are held out",
            code="requires_setting",
            keys=("validation.patience", "validation.metric"),
            fix="data.validation_size=0.02",
        )


def check_profile(profile: ProfileConfig | None, num_ranks: int) -> None:
    """Raise ConfigError if `logging.profile.ranks` names a rank that the run does not have."""
    if profile is None:
        return
    ranks = [str(rank) for rank in range(num_ranks)]
    listed = NameList(
        "logging.profile.ranks", [str(rank) for rank in profile.ranks], "is not a rank of this run", "[0]"
    )
    check_entries(listed, lambda rank: rank in ranks, ranks)


def check_exported(model: ModelConfig) -> None:
    """Raise ConfigError, with the command that creates it, if `model.pretrained` is a missing export of a recipe."""
    path = Path(model.pretrained or "")
    if path.name != "export" or path.parent.parent.name != "runs" or path.is_dir():
        return
    raise ConfigError(
        f"model.pretrained={model.pretrained} does not exist; the recipe {path.parent.name} exports it",
        code="missing_file",
        keys=("model.pretrained",),
        fix=f"automodel finetune llm -c {word(path.parent.name)}   (from the same folder)",
    )
