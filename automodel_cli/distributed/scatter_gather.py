"""Split a replicated tensor into one consecutive share per rank, and gather the shares. Differentiable.

For regions in which ranks divide the work on the same tokens. Neither direction sums: outside the region, values and
gradients are replicated.

Example: 5 rows on 2 ranks are shares of 3 and 2 rows, or 3 and 3 with padding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.distributed.typed_torch import Ctx, Function


def scatter_to_group(full: Tensor, group: dist.ProcessGroup, dim: int = 0, *, padded: bool = False) -> Tensor:
    """Return the local ceil(n / ranks) of the n entries along `dim`. The backward gathers the gradient.

    The last shares are shorter if n does not divide, or `padded` with zeros.
    """
    share: Tensor = _ShareOf.apply(full, group, dim, padded)
    return share


def gather_from_group(share: Tensor, num: int, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Return all `num` entries along `dim` from the shares of all ranks, padded or not.

    The gradient is equal on every rank, so the backward takes the local share.
    """
    full: Tensor = _AllOf.apply(share, num, group, dim)
    return full


def padding(tensor: Tensor, length: int, dim: int) -> Tensor:
    """Pad `tensor` with zeros at the end of `dim`, up to `length`."""
    missing = length - tensor.shape[dim]
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else tensor


class _ShareOf(Function):
    @staticmethod
    def forward(ctx: Ctx, full: Tensor, group: dist.ProcessGroup, dim: int, padded: bool) -> Tensor:
        num = full.shape[dim]
        ctx.sizes = (num, group, dim)
        size = _size(num, group)
        return _cut(full, size if padded else min(size, max(0, num - size * dist.get_rank(group))), group, dim)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grads[0], *ctx.sizes), None, None, None


class _AllOf(Function):
    @staticmethod
    def forward(ctx: Ctx, share: Tensor, num: int, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.sizes = (share.shape[dim], group, dim)
        return _gathered(share, num, group, dim)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _cut(grads[0], *ctx.sizes), None, None, None


# Both return new tensors and not views, which autograd functions must not return and of which FSDP2 warns.


def _cut(full: Tensor, length: int, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return `length` entries from the start of the local share, with zeros after the end of `full`."""
    num = full.shape[dim]
    first = min(num, _size(num, group) * dist.get_rank(group))
    own = full.narrow(dim, first, min(length, num - first))
    return padding(own, length, dim).clone(memory_format=torch.contiguous_format)


def _gathered(share: Tensor, num: int, group: dist.ProcessGroup, dim: int) -> Tensor:
    ranks = dist.get_world_size(group)
    share = padding(share, _size(num, group), dim).contiguous()
    of_ranks = share.new_empty(ranks * share.shape[0], *share.shape[1:])
    dist.all_gather_into_tensor(of_ranks, share, group=group)
    # The collective concatenates along dim 0. For another dim, the ranks' tensors are concatenated again.
    full = of_ranks if dim == 0 else torch.cat(of_ranks.chunk(ranks), dim)
    return full if full.shape[dim] == num else full.narrow(dim, 0, num).clone()


def _size(num: int, group: dist.ProcessGroup) -> int:
    return -(-num // dist.get_world_size(group))
