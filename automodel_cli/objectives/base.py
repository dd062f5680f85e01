"""What the step asks of an objective. An objective sees per-token log-probs, returns sums, and never divides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch


class Objective(Protocol):
    """`objective(logprobs_BT, batch)` summed over all microbatches and ranks, divided by the sum of `weight(batch)`,
    is the loss. Both are sums over the batch, so neither the number of ranks nor that of microbatches changes the
    gradient.
    """

    def weight(self, batch: Batch) -> Tensor:
        """What this batch adds to the denominator (label tokens, pairs, sequences): scalar on the batch's device."""
        ...

    def __call__(self, logprobs_BT: Tensor, batch: Batch) -> Tensor:
        """fp32 scalar with gradient: the batch's SUM, to be minimised. `logprobs_BT` is 0 where the label is
        ignored.
        """
        ...
