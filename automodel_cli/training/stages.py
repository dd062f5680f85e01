"""`Stages`: interface of the training step to the model, with or without pipeline stages."""

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
"""(output, batch) -> scalar loss, already divided by the global weight."""


class Stages(Protocol):
    """Modules of this rank, and two ways to run them. Implemented by `SingleStage` and `PipelineStages`."""

    @property
    def parts(self) -> list[nn.Module]:
        """Modules with the trained parameters, without wrappers such as DDP."""
        ...

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn, request: HeadRequest = LOGPROBS) -> Tensor:
        """Run forward and backward of every microbatch, and leave summed gradients on the parts.

        Collective: all ranks that share a batch must pass the same number of microbatches. Gradients are summed over
        the data-parallel ranks once, after the last microbatch.

        Args:
            batches: microbatches of this rank.
            loss: called on the rank with the LM head (last stage). It is already divided by the global weight, so
                nothing is rescaled here.
            request: head outputs that `loss` reads.

        Returns:
            Summed loss of this rank's sequences, a detached scalar. 0 on ranks without the last stage.
        """
        ...

    def forward(self, batches: Sequence[Batch], reduce: LossFn, request: HeadRequest = LOGPROBS) -> list[Tensor]:
        """Run forward without gradients. Returns `reduce(output, batch)` per microbatch, on every rank of the batch."""
        ...

    def in_float32(self) -> AbstractContextManager[bool]:
        """Context in which `forward` computes in float32, if the strategy can change its compute dtype. Yields whether
        it can."""
        ...

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the stages of this model. None without a pipeline."""
        ...

    @property
    def stage_owners(self) -> tuple[int, ...]:
        """Rank in `pp_group` of every stage of the model, in order; `(0,)` without a pipeline."""
        ...

    @property
    def boundary_dtype(self) -> torch.dtype | None:
        """Dtype of the hidden states between stages. None without a pipeline."""
        ...

    def schedule_svg(self, num_microbatches: int) -> str:
        """Return the timeline of a step as SVG. "" without a pipeline."""
        ...

    def takes(self, num_microbatches: int) -> bool:
        """Return whether a step may have this number of microbatches on every rank."""
        ...

    def forward_size(self, num_microbatches: int) -> int:
        """Return the number of microbatches per `forward` call that keeps all ranks busy, if a step has
        `num_microbatches`."""
        ...


class SingleStage:
    """The complete model on this rank. Runs forward and backward of one microbatch after another.

    Accepts the result of `parallelize`, or a plain part. `parts` holds the part and never a DDP wrapper, so that names
    and parameters are the same under every strategy.
    """

    def __init__(self, module: nn.Module):
        self._module, self._sharded = module, handle_of(module)
        self.parts: list[nn.Module] = [self._sharded.part]

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn, request: HeadRequest = LOGPROBS) -> Tensor:
        values = []
        for i, batch in enumerate(batches):
            # By default, only the last microbatch reduces gradients over ranks. Earlier ones add to local sums.
            with self._sharded.microbatch(is_last=i == len(batches) - 1):
                value = loss(self._output(batch, request), batch)
                value.backward()
            values.append(value.detach())
        return torch.stack(values).sum()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], reduce: LossFn, request: HeadRequest = LOGPROBS) -> list[Tensor]:
        """Run in evaluation mode (no dropout, no recomputation), and restore modes and shards."""
        training = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            return [reduce(self._output(batch, request), batch) for batch in batches]
        finally:
            for module, mode in training.items():
                module.training = mode
            # Without a backward, FSDP would keep the last layer and the root gathered.
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
