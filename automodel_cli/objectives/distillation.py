"""Distillation: a student learns the next-token distribution of a teacher. Torch-free to import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.value_checks import check_range
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.base import Metric, RewardKL

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput

_MAX_TOTAL = 1 - 1e-6
"""Maximum total probability of the compared tokens, so that the remaining probability has a logarithm."""


@dataclass(frozen=True)
class Distillation:
    """Loss = mean over label tokens of `kd_weight` x D(teacher, student) + `nll_weight` x NLL of the label.

    D is the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649, eq. 1). With M = `beta` x teacher + (1 -
    `beta`) x student, D = beta KL(teacher || M) + (1 - beta) KL(student || M).

    - beta 0: forward KL(teacher || student). The student covers all tokens that the teacher considers likely.
    - beta 1: reverse KL(student || teacher). The student concentrates on the teacher's likely tokens.

    `top_k`: number of the teacher's most likely tokens to compare. All other tokens count as one. null: the full
    vocabulary (exact, but `[B, T, V]` values per microbatch). Recipes of kind kd train on dataset rows, recipes of kind
    grpo on the student's samples. The gradient is that of D at the given tokens.

    Metrics, means over label tokens: `kd_loss` (D), `nll` of the label, and `teacher_share`, the teacher's probability
    of the `top_k` tokens.
    """

    reward_kl: ClassVar[RewardKL | None] = None
    corrects_staleness: ClassVar[bool] = True
    """See `PolicyObjective`. Two distributions can be compared on any tokens."""

    beta: float = 0.0
    """Interpolation of the generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649). 0 is the forward KL, 1
    the reverse KL."""
    top_k: int | None = 64
    """Number of the teacher's most likely tokens to compare; all others form one class. null: the whole vocabulary."""
    kd_weight: float = 1.0
    """Weight of the divergence from the teacher."""
    nll_weight: float = 0.0
    """Weight of the NLL of the labels."""

    def __post_init__(self) -> None:
        check_range("beta", self.beta, at_least=0, at_most=1, fix="objective.beta=0.5")
        check_range("top_k", self.top_k, at_least=1, fix="objective.top_k=64")
        check_range(
            "kd_weight",
            self.kd_weight,
            above=0,
            note=", or the loss does not depend on the teacher",
            fix="objective.kd_weight=1.0",
        )
        check_range("nll_weight", self.nll_weight, at_least=0, fix="objective.nll_weight=0.0")

    @property
    def needs(self) -> HeadRequest:
        """See `RequestingObjective`."""
        return HeadRequest(token_ids="teacher_ids_BTN")

    @property
    def columns(self) -> frozenset[str]:
        """See `PolicyObjective`."""
        return frozenset({"teacher_ids_BTN", "teacher_logprobs_BTN"})

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        names = ("kd_loss", "nll", "teacher_share")
        per = "num_compared_tokens"
        return {**{name: Metric(per, shown=name != "nll") for name in names}, per: Metric()}

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        loss = self.kd_weight * self._divergence(output, batch).sum()
        return loss - self.nll_weight * output.logprobs_BT.sum() if self.nll_weight else loss

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        from automodel_cli.objectives.segment_reduce import label_mask

        mask_BT = label_mask(batch)
        share_BT = batch.extra["teacher_logprobs_BTN"].exp().sum(-1)
        return {
            "kd_loss": self._divergence(output, batch).sum(),
            "nll": -output.logprobs_BT.sum(),
            "teacher_share": share_BT.masked_fill(~mask_BT, 0.0).sum(),
            "num_compared_tokens": mask_BT.sum().float(),
        }

    def _divergence(self, output: HeadOutput, batch: Batch) -> Tensor:
        """Return D per token, `[B, T]`, 0 for ignored labels."""
        from automodel_cli.objectives.segment_reduce import label_mask

        student_BTN = output.token_logprobs_BTN
        assert student_BTN is not None, "distillation needs the student's log-probs of the teacher's tokens"
        teacher_BTN = batch.extra["teacher_logprobs_BTN"]
        if self.top_k is not None:
            teacher_BTN, student_BTN = with_rest(teacher_BTN), with_rest(student_BTN)
        divergence_BT = divergence(teacher_BTN, student_BTN, self.beta)
        return divergence_BT.masked_fill(~label_mask(batch), 0.0)


def with_rest(logprobs_BTN: Tensor) -> Tensor:
    """Append a column: the log-probability of all other tokens together."""
    import torch

    # Example with top_k 2: teacher 0.6, 0.3 and the rest 0.1, student 0.5, 0.2 and 0.3. beta 0: 0.121, beta 1: 0.157,
    # beta 0.5: 0.034. Without the rest, a student could lower the divergence by moving mass to tokens outside the top
    # k.
    rest_BT1 = torch.log1p(-logprobs_BTN.exp().sum(-1, keepdim=True).clamp(max=_MAX_TOTAL))
    return torch.cat([logprobs_BTN, rest_BT1], -1)


def divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of log-probs over the last dimension. See `Distillation`."""
    import torch

    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    # log(beta p + (1 - beta) q).
    middle = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    terms = beta * teacher.exp() * (teacher - middle) + (1 - beta) * student.exp() * (student - middle)
    return terms.sum(-1)
