"""Context parallelism: the ranks of an axis share the tokens of each sequence.

The part (`models/model_part.py`) selects the local tokens, its attention gathers keys and values, and its log-probs are
gathered to full sequences. So objectives, `Batch` and the training step need no special case. Every rank has the
complete loss of its sequences and the gradient through its own tokens. FSDP sums gradients over `dp_shard x cp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.distributed.typed_torch import Ctx, Function

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SharesContext(Protocol):
    """Interface of a part with context parallelism. Implemented by `models.model_part.ModelPart`."""

    def share_context(self, group: RankGroup) -> None:
        """Process local tokens only from now on. Raises ConfigError if the attention does not support it."""
        ...


def apply_context_parallel(part: nn.Module, cp_mesh: DeviceMesh, *, ring: bool) -> None:
    """Shard the sequences of `part` over the axis, in place. Raises ConfigError for attention other than packed."""
    cast(SharesContext, part).share_context(RankGroup(cp_mesh.get_group(), ring=ring))


class RankGroup:
    """The ranks of a context-parallel axis and their communication."""

    def __init__(self, group: dist.ProcessGroup, *, ring: bool):
        """`ring`: attention passes keys from rank to rank (`pass_on`) instead of gathering them."""
        self._group, self.ring = group, ring
        self.rank, self.size = group.rank(), group.size()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the axis, in order."""
        return tuple(dist.get_process_group_ranks(self._group))

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate `[n, ...]` of all ranks to `[size * n, ...]`. Collective.

        The backward reduce-scatters the gradient.
        """
        gathered: Tensor = _Gather.apply(x, self._group, True)
        return gathered

    def gather_results(self, x: Tensor) -> Tensor:
        """Concatenate results that every rank uses identically. The backward takes the local slice. Collective."""
        gathered: Tensor = _Gather.apply(x, self._group, False)
        return gathered

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send `x` to the next rank. The returned function waits for the tensor of the previous rank.
        Collective.

        Not differentiable.
        """
        sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        # One batch: NCCL runs separate operations in order, and a ring in which every rank sends first would deadlock.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=(self.rank + 1) % self.size),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=(self.rank - 1) % self.size),
            ]
        )

        # The closure keeps `sent` alive until the transfer has ended.
        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return received

        return arrived


class _Gather(Function):
    """Custom function, because torch's differentiable all-gather has different names in 2.11 and 2.13."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.group, ctx.sums = group, sums
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Every rank has the same gradient, so its own slice is complete.
        if not ctx.sums:
            return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None
        # Every rank used all keys, and has a part of the gradient of each. Rank r receives the sum for its own rows.
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None, None
