"""A policy-gradient objective of your own: REINFORCE over whole responses, its importance weight clipped.

    automodel grpo llm -c quickstart_grpo \
        objective='{_target_: own_policy.ClippedReinforce, max_weight: 2.0}' --trust-package own_policy
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.base import RewardKL
from automodel_cli.objectives.segment_reduce import label_mask


@dataclass(frozen=True)
class ClippedReinforce:
    """Loss = mean over tokens of -A w log p, w = min(max_weight, p / p of the sampler) without gradient."""

    max_weight: float = 2.0

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"advantages_BT", "sampler_logprobs_BT"})

    @property
    def reward_kl(self) -> RewardKL | None:
        return None

    @property
    def corrects_staleness(self) -> bool:
        return True  # that is what w is for

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        logprobs_BT = output.logprobs_BT
        mask_BT = label_mask(batch)
        weight_BT = (logprobs_BT.detach() - batch.extra["sampler_logprobs_BT"]).exp().clamp(max=self.max_weight)
        losses_BT = -batch.extra["advantages_BT"] * weight_BT * logprobs_BT
        return losses_BT.masked_fill(~mask_BT, 0.0).sum()
