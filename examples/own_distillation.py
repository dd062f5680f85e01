"""Distillation of your own: the student learns the teacher's distribution over its likeliest tokens.

For library users, who own the loop (see docs/api.md). `taught` runs the teacher, in as many stages as it has, and
writes its likeliest tokens into the batches; `train_step(student, taught(teacher, batches, 16), Distillation(), ...)`
then compares the student's log-probs of the same tokens with the teacher's. Full logits exist on neither side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.objectives.segment_reduce import label_mask
from automodel_cli.training.stages import Stages


def taught(teacher: Stages, batches: Sequence[Batch], k: int) -> list[Batch]:
    """The batches with the `k` tokens that the teacher thinks likeliest in each label's place, and their log-probs."""

    def likeliest(output: HeadOutput, batch: Batch) -> Tensor:
        assert output.topk_logprobs_BTK is not None and output.topk_ids_BTK is not None
        return torch.stack([output.topk_logprobs_BTK.double(), output.topk_ids_BTK.double()])

    found = teacher.forward(batches, likeliest, HeadRequest(topk=k))
    return [
        batch.with_columns(teacher_logprobs_BTN=logprobs_BTN.float(), teacher_ids_BTN=ids_BTN.long())
        for batch, (logprobs_BTN, ids_BTN) in zip(batches, found, strict=True)
    ]


@dataclass(frozen=True)
class Distillation:
    """Loss = mean over label tokens of KL(teacher || student), all tokens outside the teacher's likeliest as one."""

    @property
    def needs(self) -> HeadRequest:
        return HeadRequest(token_ids="teacher_ids_BTN")

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        teacher_BTN, student_BTN = batch.extra["teacher_logprobs_BTN"], output.token_logprobs_BTN
        assert student_BTN is not None
        kl_BT = (teacher_BTN.exp() * (teacher_BTN - student_BTN)).sum(-1)
        rest_BT = _log_rest(teacher_BTN)
        kl_BT = kl_BT + rest_BT.exp() * (rest_BT - _log_rest(student_BTN))
        return kl_BT.masked_fill(~label_mask(batch), 0.0).sum()


def _log_rest(logprobs_BTN: Tensor) -> Tensor:
    """Log of the probability that these tokens leave to all others."""
    return torch.log1p(-logprobs_BTN.exp().sum(-1).clamp(max=1 - 1e-6))
