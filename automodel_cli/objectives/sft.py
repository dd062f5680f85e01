"""Supervised fine-tuning: the negative log-likelihood of the label tokens, each with the same weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class SFT:
    """Loss = -sum of label log-probs / label tokens of the step.

    The mean is over tokens, not over rows or ranks.

    Example: log-probs -1 and -3 of the only two labels give a loss of 2, in any split over microbatches and ranks.
    """

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return -output.logprobs_BT.sum()
