"""`Stages`: how a step reaches the model without knowing whether it is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.gradients import gradient_sync, reshard, unwrap

LossFn = Callable[[Tensor, Batch], Tensor]
"""(logprobs_BT, batch) -> scalar, already divided by the global weight."""


class Stages(Protocol):
    """The modules this rank owns, and the two ways to run them. Implemented by `SingleStage` and `AutoPipeline`."""

    @property
    def parts(self) -> list[nn.Module]:
        """The modules whose parameters are trained, never a wrapper's."""
        ...

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn) -> Tensor:
        """Run every microbatch and leave summed gradients on the parts.

        `loss` is called where the log-probs are (the last stage) and is already divided by the global weight; nothing
        in here rescales. Collective: all ranks that share a batch must pass equally many microbatches. Gradients are
        reduced over the data-parallel ranks (by SUM) once, on the last microbatch.

        Returns the summed loss of this rank's rows, a detached scalar; zero on ranks without the last stage.
        """
        ...

    def forward(self, batches: Sequence[Batch], reduce: LossFn) -> list[Tensor]:
        """Forward only, no gradients: `reduce(logprobs_BT, batch)` per microbatch, on every rank of the batch."""
        ...


class SingleStage:
    """The whole model on this rank: every microbatch forward and backward, one after another.

    Takes what `parallelize` returned, or a plain part. `parts` holds the part itself, never a DDP wrapper, so that
    names and parameters look the same under every strategy.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self.parts: list[nn.Module] = [unwrap(module)]

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn) -> Tensor:
        values = []
        for i, batch in enumerate(batches):
            with gradient_sync(self._module, is_last=i == len(batches) - 1):
                value = loss(self._logprobs(batch), batch)
                value.backward()
            values.append(value.detach())
        return torch.stack(values).sum()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], reduce: LossFn) -> list[Tensor]:
        """Runs in evaluation mode (no dropout, nothing recomputed) and leaves modes and shards as they were."""
        training = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            return [reduce(self._logprobs(batch), batch) for batch in batches]
        finally:
            for module, mode in training.items():
                module.training = mode
            reshard(self._module)

    def _logprobs(self, batch: Batch) -> Tensor:
        logprobs_BT: Tensor = self._module(labels=batch.labels_BT, **batch.model_inputs())
        return logprobs_BT
