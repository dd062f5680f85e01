"""A preference objective of your own: a hinge on the difference of mean log-probs, without a reference model.

    automodel dpo llm -c quickstart_dpo \
        objective='{_target_: own_preference.MarginHinge, margin: 0.5}' --trust-package own_preference
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.preference_losses import Pairs, gather_pairs, valid_pairs


@dataclass(frozen=True)
class MarginHinge:
    """Loss = mean over pairs of max(0, margin - (c - r)), c and r the mean log-probs of the two responses' tokens."""

    margin: float = 0.5

    @property
    def columns(self) -> frozenset[str]:
        """Pairs, and no reference's log-probs."""
        return frozenset({"pairs_P2"})

    def weight(self, batch: Batch) -> Tensor:
        return valid_pairs(batch).sum()

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        pairs: Pairs = gather_pairs(output.logprobs_BT, batch, reference=False, average=True)
        losses_P = (self.margin - (pairs.c_P - pairs.r_P)).clamp(min=0)
        return (losses_P * pairs.valid_P).sum()  # a sum: the step divides by the weight of all ranks
