"""`Stages`: how a step reaches the model without knowing whether it is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from automodel_cli.data.batch import Batch

LossFn = Callable[[Tensor, Batch], Tensor]
"""(logprobs_BT, batch) -> scalar, already divided by the global weight."""


class Stages(Protocol):
    """The modules this rank owns, and the two ways to run them. Implemented by `SingleStage` and `AutoPipeline`."""

    parts: list[nn.Module]

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn) -> Tensor:
        """Run every microbatch and leave summed gradients on the parts.

        `loss` is called where the log-probs are (the last stage) and is already divided by the global weight; nothing in here
        rescales. Collective: all ranks that share a batch must pass equally many microbatches. Gradients are reduced over the
        data-parallel ranks (by SUM) once, on the last microbatch.

        Returns the summed loss of this rank's rows, a detached scalar; zero on ranks without the last stage.
        """
        ...

    def forward(self, batches: Sequence[Batch], reduce: LossFn) -> list[Tensor]:
        """Forward only, no gradients: `reduce(logprobs_BT, batch)` per microbatch, on every rank that shares the batch."""
        ...
