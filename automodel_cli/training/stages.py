"""`Stages`: how a step reaches the model without knowing whether it is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.sharded_module import handle_of

LossFn = Callable[[HeadOutput, Batch], Tensor]
"""(output, batch) -> scalar, already divided by the global weight."""


class Stages(Protocol):
    """The modules this rank owns, and the two ways to run them. Implemented by `SingleStage` and
    `PipelineStages`."""

    @property
    def parts(self) -> list[nn.Module]:
        """The modules whose parameters are trained, never a wrapper's."""
        ...

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn, request: HeadRequest = LOGPROBS) -> Tensor:
        """Run every microbatch and leave summed gradients on the parts.

        `loss` is called where the head is (the last stage), on the fields that `request` asks for, and is already
        divided by the global weight; nothing in here rescales. Collective: all ranks that share a batch must pass
        equally many microbatches. Gradients are reduced over the data-parallel ranks (by SUM) once, on the last
        microbatch.

        Returns the summed loss of this rank's rows, a detached scalar; zero on ranks without the last stage.
        """
        ...

    def forward(self, batches: Sequence[Batch], reduce: LossFn, request: HeadRequest = LOGPROBS) -> list[Tensor]:
        """Forward only, no gradients: `reduce(output, batch)` per microbatch, on every rank of the batch."""
        ...

    def in_float32(self) -> AbstractContextManager[bool]:
        """Inside, `forward` computes in float32 where the strategy can change its compute dtype; gives whether it
        does."""
        ...

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of this model; None for a whole one."""
        ...

    @property
    def stage_owners(self) -> tuple[int, ...]:
        """Rank in `pp_group` of every stage of the model, in its order; `(0,)` for a whole one."""
        ...

    @property
    def boundary_dtype(self) -> torch.dtype | None:
        """Of the hidden states between stages; None where there is nothing between."""
        ...

    def schedule_svg(self, num_microbatches: int) -> str:
        """The timeline of a step as a picture; "" where nothing is cut."""
        ...

    def takes(self, num_microbatches: int) -> bool:
        """Whether a step may have so many microbatches, with equally many for every rank to wait for."""
        ...

    def forward_size(self, num_microbatches: int) -> int:
        """Microbatches that a call of `forward` should get where many are at hand and a step has `num_microbatches`: as
        many as keep all ranks busy."""
        ...


class SingleStage:
    """The whole model on this rank: every microbatch forward and backward, one after another.

    Takes what `parallelize` returned, or a plain part. `parts` holds the part itself, never a DDP wrapper, so that
    names and parameters look the same under every strategy.
    """

    def __init__(self, module: nn.Module):
        self._module, self._sharded = module, handle_of(module)
        self.parts: list[nn.Module] = [self._sharded.part]

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn, request: HeadRequest = LOGPROBS) -> Tensor:
        values = []
        for i, batch in enumerate(batches):
            with self._sharded.microbatch(is_last=i == len(batches) - 1):
                value = loss(self._output(batch, request), batch)
                value.backward()
            values.append(value.detach())
        return torch.stack(values).sum()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], reduce: LossFn, request: HeadRequest = LOGPROBS) -> list[Tensor]:
        """Runs in evaluation mode (no dropout, nothing recomputed) and leaves modes and shards as they were."""
        training = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            return [reduce(self._output(batch, request), batch) for batch in batches]
        finally:
            for module, mode in training.items():
                module.training = mode
            self._sharded.reshard()

    def in_float32(self) -> AbstractContextManager[bool]:
        return self._sharded.in_float32()

    @property
    def pp_group(self) -> None:
        return None

    @property
    def stage_owners(self) -> tuple[int, ...]:
        return (0,)

    @property
    def boundary_dtype(self) -> None:
        return None

    def schedule_svg(self, num_microbatches: int) -> str:
        return ""

    def takes(self, num_microbatches: int) -> bool:
        return True

    def forward_size(self, num_microbatches: int) -> int:
        return 1

    def _output(self, batch: Batch, request: HeadRequest) -> HeadOutput:
        output: HeadOutput = self._module(**batch.head_inputs(request), **batch.model_inputs())
        return output
