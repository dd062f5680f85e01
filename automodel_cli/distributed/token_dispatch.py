"""Tokens to the ranks that hold their experts, and the results back: the part of expert parallelism that communicates.

A dispatcher sends every (token, expert) pair of this rank to the rank of the expert, and nothing is ever dropped. All
ranks of the group take part in every call, in the same order, in forward, in recomputation and in backward, also those
that no token reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

LocalExperts = Callable[[Tensor, Tensor], Tensor]
"""(hidden_ND, local expert of each row [N]) -> what that expert makes of each row [N, D]."""


class TokenDispatcher(Protocol):
    """One backend of expert parallelism."""

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: LocalExperts) -> Tensor:
        """[T, D]: the sum over K of weight x expert(hidden), `index_TK` counting over the experts of all ranks.

        Differentiable in `hidden_TD`, `weight_TK` and in what `experts` computes with. Collective over the group, and
        so is its backward.
        """
        ...


class AllToAll:
    """Any device: tokens sorted by expert, one exchange of counts, one host synchronisation, two all-to-alls.

    Routing weights stay on the sender, so that their gradient does too.
    """

    def __init__(self, num_local_experts: int, group: dist.ProcessGroup):
        self.num_local_experts, self.group, self.size = num_local_experts, group, dist.get_world_size(group)

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: LocalExperts) -> Tensor:
        index_P = index_TK.flatten()  # P = T * K pairs of a token and an expert
        order_P = torch.argsort(index_P, stable=True)
        sent = torch.bincount(index_P, minlength=self.num_local_experts * self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        per_rank = torch.stack([sent, received]).view(2, self.size, self.num_local_experts).sum(2)
        send, receive = per_rank.tolist()  # the one host synchronisation
        hidden_ND = _Exchange.apply(hidden_TD[order_P // index_TK.shape[1]], send, receive, self.group)
        expert_N = torch.arange(self.num_local_experts, device=hidden_TD.device).repeat(self.size)
        expert_N = expert_N.repeat_interleave(received, output_size=sum(receive))
        result_ND = at_least_one_row(experts, hidden_ND, expert_N)
        result_PD = _Exchange.apply(result_ND, receive, send, self.group)
        result_TKD = torch.empty_like(result_PD).index_copy(0, order_P, result_PD).view(*index_TK.shape, -1)
        return (result_TKD * weight_TK.unsqueeze(-1)).sum(1).to(hidden_TD.dtype)


def at_least_one_row(experts: LocalExperts, hidden_ND: Tensor, expert_N: Tensor) -> Tensor:
    """`experts` on these rows. Where there is none it runs on a row of zeros whose result is dropped: grouped products
    refuse empty input, and every rank must produce the (zero) gradients that its group reduces.
    """
    if len(expert_N):
        return experts(hidden_ND, expert_N)
    return experts(hidden_ND.sum(0, keepdim=True), expert_N.new_zeros(1))[:0]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = (send, receive, group)
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send, receive, group = ctx.sizes
        return _exchange(grads[0], receive, send, group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), receive, send, group=group)
    return result
