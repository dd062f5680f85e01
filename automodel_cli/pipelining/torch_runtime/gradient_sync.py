"""Gradient sums that neither autograd nor FSDP computes.

These are sums of unsharded parameters over data-parallel ranks, and sums over the copies of an embedding table on
several stages. Both apply to the gradients of one step only, and not to earlier accumulated ones. So two accumulated
steps are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.distributed.tensors import to_local

_BUCKET_ELEMENTS = 2**23  # 32 MiB of float32 per all-reduce.


@contextmanager
def only_this_step(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Collect the gradients of this step only in `.grad` inside this context. After it, earlier gradients are added."""
    before = {param: param.grad for param in parameters}  # A dict, because a tied table may occur twice.
    for param in before:
        param.grad = None
    try:
        yield
    finally:
        for param, old in before.items():
            if old is not None:
                # Summed over ranks already: the sum over ranks of (old + new) would count `old` once per rank.
                param.grad = old if param.grad is None else old.add_(param.grad)


@torch.no_grad()
def sum_over_groups(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Sum gradients of unsharded parameters over all ranks reached through `groups`, in buckets. Collective."""
    if not groups:
        return
    for param in parameters:
        if param.grad is None:
            # A parameter without a gradient here may have one on another rank (experts, unused towers). All ranks must
            # send the same number of elements.
            param.grad = torch.zeros_like(param)
    grads = [param.grad for param in parameters if param.grad is not None]
    for bucket in _buckets(grads):
        # One collective per bucket. Norm weights have a few thousand elements, for which latency dominates.
        flat = torch.cat([grad.flatten() for grad in bucket])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(summed.view_as(grad))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        # `cat` needs one dtype. A gradient larger than a bucket is a bucket of its own.
        if bucket and (size + grad.numel() > _BUCKET_ELEMENTS or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def sum_tied(copies: Sequence[nn.Parameter], ranks: Sequence[int], group: dist.ProcessGroup) -> None:
    """Replace the gradients of all copies of a table by their sum, bitwise equal on every rank.

    Shards are summed as shards, because all copies have the same placement. Called by `ranks` only.

    Args:
        copies: copies on this rank.
        ranks: ranks in `group` with copies, including this one.
    """
    local = [to_local(_gradient(param)) for param in copies]
    # A rank may have two copies: on a V, rank 0 has the first and the last stage.
    local_sum = sum(local[1:], local[0]).contiguous()
    sum_of_rank = {rank: torch.empty_like(local_sum) for rank in ranks if rank != dist.get_rank(group)}
    operations = []
    for rank, remote_sum in sum_of_rank.items():
        other = dist.get_global_rank(group, rank)
        operations += [
            dist.P2POp(dist.isend, local_sum, other, group),
            dist.P2POp(dist.irecv, remote_sum, other, group),
        ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    sum_of_rank[dist.get_rank(group)] = local_sum
    # In the order of ranks on every rank, so that floating-point sums are equal. An all-reduce needs a group of these
    # ranks.
    first, *others = (sum_of_rank[rank] for rank in ranks)
    total = sum(others, first)
    for gradient in local:
        gradient.copy_(total)


def _gradient(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
