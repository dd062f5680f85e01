"""Frozen teacher model, and its log-probs for the batches of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.models.hub.source import hf_config
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.run.model_builder import Model
from automodel_cli.training.stages import Stages

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


def build_teacher(session: Trainer, config: TeacherConfig) -> Model:
    """Build the frozen teacher, sharded like the student. Collective. Raises ConfigError for another vocabulary."""
    model = config.as_model()
    check_vocabulary(session, config)
    return Model.build(dataclasses.replace(session.recipe, model=model), session.mesh, frozen=True)


def add_teacher_logprobs(
    stages: Stages, batches: Sequence[Batch], top_k: int | None, device: torch.device
) -> list[Batch]:
    """Return the batches on the device with the teacher's most likely tokens and their log-probs (`teacher_ids_BTN`,
    `teacher_logprobs_BTN`). None: all tokens of its vocabulary. Collective."""
    request = HeadRequest(topk=num_logits(stages) if top_k is None else top_k)

    def likeliest(output: HeadOutput, _: Batch) -> Tensor:
        assert output.topk_logprobs_BTK is not None and output.topk_ids_BTK is not None
        return torch.stack([output.topk_logprobs_BTK.double(), output.topk_ids_BTK.double()])  # ids are exact in it

    given = [batch.to(device) for batch in batches]
    return [
        batch.with_columns(teacher_logprobs_BTN=logprobs_BTN.float(), teacher_ids_BTN=ids_BTN.long())
        for batch, (logprobs_BTN, ids_BTN) in zip(given, stages.forward(given, likeliest, request), strict=True)
    ]


def num_logits(stages: Stages) -> int:
    """Of the teacher, padded entries of its vocabulary included."""
    from automodel_cli.models.model_part import model_parts

    part, *_ = model_parts(stages.parts)
    size: int = part.model.config.get_text_config().vocab_size
    return size


def check_vocabulary(session: Trainer, config: TeacherConfig) -> None:
    """Raise unless ids mean the same for both models. A model without a tokenizer is compared by vocabulary size."""
    model = config.as_model()
    sizes = [hf_config(of).get_text_config().vocab_size for of in (session.recipe.model, model)]
    try:
        teacher_vocabulary = load_tokenizer(model).get_vocab()
    except ConfigError:
        teacher_vocabulary = None
    if sizes[0] != sizes[1] or (teacher_vocabulary is not None and teacher_vocabulary != session.tokenizer.get_vocab()):
        raise ConfigError(
            f"teacher.pretrained={config.pretrained} has another vocabulary ({sizes[1]:,} tokens) than the student "
            f"({sizes[0]:,} tokens), so their distributions cannot be compared",
            code="vocabulary_mismatch",
            keys=("teacher.pretrained",),
            fix="teacher.pretrained=<a model with the student's tokenizer>",
        )
