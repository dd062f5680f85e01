"""Supervised fine-tuning: the negative log-likelihood of the label tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.objectives.sources import label_weight, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class SFT:
    """Loss = -sum of label log-probs / label tokens of the step, each times the loss weight of its dataset.

    The mean is over tokens, not over rows or ranks.

    Example: log-probs -1 and -3 of the only two labels give a loss of 2, in any split over microbatches and ranks. If
    they belong to datasets with loss weights 1 and 0.5, it is (1 + 0.5 * 3) / (1 + 0.5).
    """

    uses_loss_weights: ClassVar[bool] = True

    def weight(self, batch: Batch) -> Tensor:
        return label_weight(batch)

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return -weighted(output.logprobs_BT, batch).sum()
