"""Context parallelism: the ranks of an axis share the tokens of whole rows.

Everything happens inside the part (`models/model_part.py`): it takes this rank's share of the rows, its attention
gathers
keys and values, and its log-probs come back whole. So objectives, `Batch` and the step know nothing of it. Every rank
has the whole loss of its rows, and the gradient of that loss through its own tokens; FSDP, which works on
`dp_shard x cp`, sums them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SharesContext(Protocol):
    """What a part does itself; implemented by `models.part.ModelPart`."""

    def share_context(self, group: RankGroup) -> None:
        """Work on this rank's tokens from now on; raise ConfigError where attention cannot."""
        ...


def apply_context_parallel(part: nn.Module, cp_mesh: DeviceMesh, *, ring: bool) -> None:
    """Let `part` share its rows over the axis, in place. Raises ConfigError for attention other than packed."""
    cast(SharesContext, part).share_context(RankGroup(cp_mesh.get_group(), ring=ring))


class RankGroup:
    """The ranks of a context-parallel axis and their exchanges."""

    def __init__(self, group: dist.ProcessGroup, *, ring: bool):
        """`ring`: attention passes keys around (`pass_on`) instead of gathering them."""
        self._group, self.ring = group, ring
        self.rank, self.size = group.rank(), group.size()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of all processes, in their order here."""
        return tuple(dist.get_process_group_ranks(self._group))

    def gather(self, x: Tensor) -> Tensor:
        """`[n, ...]` of every rank, one rank after another: `[size * n, ...]`. The backward sums over ranks and
        scatters. Collective."""
        gathered: Tensor = _Gather.apply(x, self._group, True)
        return gathered

    def gather_results(self, x: Tensor) -> Tensor:
        """The same for results that every rank then uses alike: the backward takes this rank's slice. Collective."""
        gathered: Tensor = _Gather.apply(x, self._group, False)
        return gathered

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send `x` to the next rank; the function waits for the previous rank's. No gradients. Collective."""
        sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=(self.rank + 1) % self.size),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=(self.rank - 1) % self.size),
            ]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return received

        return arrived


class _Gather(torch.autograd.Function):
    """An own function, because torch's differentiable all-gather has different names in 2.11 and 2.13."""

    @staticmethod
    def forward(ctx, x, group, sums):  # type: ignore[no-untyped-def]
        ctx.group, ctx.sums = group, sums
        whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if not ctx.sums:
            return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None, None
