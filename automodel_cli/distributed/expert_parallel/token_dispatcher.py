"""Tokens to the ranks that hold their experts, and the results back: the part of expert parallelism that communicates.

A dispatcher sends every (token, expert) pair of this rank to the rank of the expert, and nothing is ever dropped. All
ranks of the group take part in every call, in the same order, in forward, in recomputation and in backward, also those
that no token reaches. Exchanges are made once: a layer that is recomputed keeps what it received (`kept`). They are
started, and waited for where their rows are needed (`Arriving`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.distributed.activation_checkpointing.saved_results import SaveLevel, save_or_replay
from automodel_cli.distributed.expert_parallel import permute

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
        self.num_local_experts, self.group = num_local_experts, group

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: LocalExperts) -> Tensor:
        routes = save_or_replay(lambda: find_routes(index_TK, self.num_local_experts, self.group), SaveLevel.ROUTES)
        hidden_ND = _Exchange.apply(hidden_TD[routes.token_P], routes, True)
        result_ND = at_least_one_row(experts, hidden_ND, routes.experts_of_arrivals())
        result_PD = _Exchange.apply(result_ND, routes, False)
        result_TKD = result_PD[routes.place_P].view(*index_TK.shape, -1)
        return (result_TKD * weight_TK.unsqueeze(-1)).sum(1).to(hidden_TD.dtype)


@dataclass(eq=False)
class Arriving:
    """An exchange of rows that is under way. Called, it waits (on CUDA the device's current stream does) and returns
    `rows`, which nobody reads before. Work without an order with it may be launched in between."""

    rows: Tensor
    sent: Tensor | None
    """Kept, for the library still reads it."""
    work: Any
    """`dist.Work`, or None where nothing travels any more."""

    def __call__(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.sent = self.work = None
        return self.rows

    def __del__(self) -> None:
        """Where nobody asked for the rows (a repeated layer ends as soon as it has what backward needs), the allocator
        must not give their memory away while they are written."""
        self()


@dataclass(frozen=True)
class Routes:
    """Where the P = T x K pairs of a token and an expert go, and which N rows arrive here.

    Pairs leave in the order of their experts: `order_P`, with the token of each, and the inverse `place_P`. Rows arrive
    by rank of origin, then by expert. `send` and `receive` count rows by rank, `received_RL` (int64, R ranks, L local
    experts) in all detail, `arrivals_L` by expert, on the host.
    """

    order_P: Tensor
    token_P: Tensor
    place_P: Tensor
    received_RL: Tensor
    send: list[int]
    receive: list[int]
    arrivals_L: list[int]
    group: dist.ProcessGroup | None

    @property
    def num_arrivals(self) -> int:
        return sum(self.receive)

    def there(self, rows_P: Tensor) -> Arriving:
        """Rows (or scalars) of sorted pairs to the ranks of their experts. Collective."""
        return exchange(rows_P, self.send, self.receive, self.group)

    def back(self, rows_N: Tensor) -> Arriving:
        """Rows as they arrived, or results of them, to where they came from. Collective."""
        return exchange(rows_N, self.receive, self.send, self.group)

    def experts_of_arrivals(self) -> Tensor:
        """int64 [N]: the local expert that each row is for."""
        ranks, experts = self.received_RL.shape
        expert_RL = torch.arange(experts, device=self.received_RL.device).repeat(ranks)
        return expert_RL.repeat_interleave(self.received_RL.flatten(), output_size=self.num_arrivals)


def find_routes(index_TK: Tensor, num_local_experts: int, group: dist.ProcessGroup | None) -> Routes:
    """One host synchronisation: sizes of messages are numbers of the host. Collective; without a group all experts are
    here.
    """
    size = 1 if group is None else dist.get_world_size(group)
    expert_P, order_P = torch.sort(index_TK.flatten(), stable=True)
    num_experts = num_local_experts * size
    token_P, place_P, sent = permute.permute_pairs(expert_P, order_P, index_TK.shape[1], num_experts)
    received = exchange(sent, [num_local_experts] * size, [num_local_experts] * size, group)()
    of_experts = torch.stack([sent, received]).tolist()  # the one host synchronisation
    send, receive = (
        [sum(counts[first : first + num_local_experts]) for first in range(0, len(counts), num_local_experts)]
        for counts in of_experts
    )
    arrivals_L = [sum(of_experts[1][expert::num_local_experts]) for expert in range(num_local_experts)]
    received_RL = received.view(size, num_local_experts)
    return Routes(order_P, token_P, place_P, received_RL, send, receive, arrivals_L, group)


def at_least_one_row(experts: LocalExperts, hidden_ND: Tensor, expert_N: Tensor) -> Tensor:
    """`experts` on these rows. Where there is none it runs on a row of zeros whose result is dropped: grouped products
    refuse empty input, and every rank must produce the (zero) gradients that its group reduces.
    """
    if len(expert_N):
        return experts(hidden_ND, expert_N)
    return experts(hidden_ND.sum(0, keepdim=True), expert_N.new_zeros(1))[:0]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, there or back; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, there: bool) -> Tensor:
        ctx.way_back = routes.back if there else routes.there
        arrived = save_or_replay(lambda: (routes.there if there else routes.back)(rows)())
        return arrived.detach()  # what is kept must not know the graph of its first use

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way_back(grads[0])(), None, None


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Arriving:
    """Start sending `rows` to all ranks of the group, so many to each. Without a group they are there already."""
    if group is None:
        return Arriving(rows, rows, None)
    arriving, sent = rows.new_empty(sum(receive), *rows.shape[1:]), rows.contiguous()
    return Arriving(arriving, sent, dist.all_to_all_single(arriving, sent, receive, send, group=group, async_op=True))
