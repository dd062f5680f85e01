"""Communication of expert parallelism: send tokens to the ranks of their experts, and return the results.

A dispatcher sends every (token, expert) pair of this rank to the rank of the expert. No pair is dropped. All ranks of
the group take part in every call in the same order, in forward, recomputation and backward, even without tokens.

A recomputed layer reuses the rows that it received (`activation_checkpointing.saved_results`) and does not communicate
again. Transfers start early and are waited for when their rows are needed (`Arriving`).

Shapes: T tokens, K experts per token, P = T x K pairs, N received rows, R ranks, L local experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.distributed.activation_checkpointing.saved_results import SaveLevel, save_or_replay
from automodel_cli.distributed.expert_parallel import permute
from automodel_cli.distributed.typed_torch import Ctx, Function

LocalExperts = Callable[[Tensor, Tensor], Tensor]
"""`(hidden_ND, expert_N)` -> `[N, D]`: the result of local expert `expert_N[n]` for row n."""


class TokenDispatcher(Protocol):
    """Backend of expert parallelism."""

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: LocalExperts) -> Tensor:
        """Return the sum over K of weight x expert(hidden), `[T, D]`. `index_TK` numbers the experts of all ranks.

        Differentiable in `hidden_TD`, `weight_TK` and the parameters of `experts`. Collective over the group, also in
        backward.
        """
        ...


class AllToAll:
    """Dispatch on any device: sort by expert, exchange counts, synchronize with the host once, two all-to-alls.

    Routing weights and their gradients stay on the source rank.
    """

    def __init__(self, num_local_experts: int, group: dist.ProcessGroup):
        self.num_local_experts, self.group = num_local_experts, group

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: LocalExperts) -> Tensor:
        routes = save_or_replay(lambda: find_routes(index_TK, self.num_local_experts, self.group), SaveLevel.ROUTES)
        # (T, D) -> (P, D): each token once per expert, sorted by expert -> all-to-all -> (N, D).
        hidden_ND = _Exchange.apply(hidden_TD[routes.token_P], routes, True)
        result_ND = at_least_one_row(experts, hidden_ND, routes.experts_of_arrivals())
        # (N, D) -> all-to-all -> (P, D), in the order in which the pairs were sent.
        result_PD = _Exchange.apply(result_ND, routes, False)
        # (P, D) in expert order -> (T, K, D). The weights never left this rank, so their gradient needs no
        # communication.
        result_TKD = result_PD[routes.place_P].view(*index_TK.shape, -1)
        result_TD: Tensor = (result_TKD * weight_TK.unsqueeze(-1)).sum(1).to(hidden_TD.dtype)
        return result_TD


class Waitable(Protocol):
    """`dist.Work`, or its stand-in."""

    def wait(self) -> object: ...


@dataclass(eq=False)
class Arriving:
    """All-to-all in progress. A call waits for it and returns `rows`.

    On CUDA, the current stream waits and not the host. Independent work may be launched before the call.
    """

    rows: Tensor
    sent: Tensor | None
    """Kept alive until the transfer ends."""
    work: Waitable | None
    """None after the transfer."""

    def __call__(self) -> Tensor:
        # A second call finds None and returns at once, so `__del__` may follow a normal call.
        if self.work is not None:
            self.work.wait()
            self.sent = self.work = None
        return self.rows

    def __del__(self) -> None:
        """Wait before the memory of `rows` is released.

        A recomputed layer stops as soon as backward has its tensors, so nobody may call this object. Without the wait,
        the allocator could reuse memory that is still being written.
        """
        self()


@dataclass(frozen=True)
class Routes:
    """Destination of the P pairs of this rank, and origin of the N rows that it receives.

    Example: 2 ranks with L=1 expert each. Rank 0 has tokens with experts [0], [1] and rank 1 has [0], [0]. Rank 0 has
    `send` = [1, 1] and `receive` = [1, 2]. Rank 1 has `send` = [2, 0] and `receive` = [1, 0].

    Attributes:
        order_P: pairs sorted by expert. `token_P` has the token of each, `place_P` is the inverse.
        received_RL: received rows by source rank and local expert, int64. Rows arrive in this order.
        send, receive: rows per rank, on the host.
        arrivals_L: received rows per local expert, on the host.
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
        """Send rows (or scalars) of sorted pairs to the ranks of their experts. Collective."""
        return exchange(rows_P, self.send, self.receive, self.group)

    def back(self, rows_N: Tensor) -> Arriving:
        """Return received rows, or their results, to their source ranks. Collective."""
        return exchange(rows_N, self.receive, self.send, self.group)

    def experts_of_arrivals(self) -> Tensor:
        """Return the local expert of each received row, int64 `[N]`."""
        ranks, experts = self.received_RL.shape
        # Example: received_RL [[1, 2], [0, 1]] gives the experts 0, 1, 1 (from rank 0) and 1 (from rank 1).
        expert_RL = torch.arange(experts, device=self.received_RL.device).repeat(ranks)
        return expert_RL.repeat_interleave(self.received_RL.flatten(), output_size=self.num_arrivals)


def find_routes(index_TK: Tensor, num_local_experts: int, group: dist.ProcessGroup | None) -> Routes:
    """Compute the routes of this rank. Collective, with one host synchronization for the message sizes.

    Without a group, all experts are local.
    """
    size = 1 if group is None else dist.get_world_size(group)
    # index_TK holds global expert ids. Sorting by id also sorts by rank: rank r has the ids r L to (r + 1) L - 1.
    # Stable, so the tokens of an expert keep their order. The sums of a run are then the same each time.
    expert_P, order_P = torch.sort(index_TK.flatten(), stable=True)
    num_experts = num_local_experts * size
    token_P, place_P, sent = permute.permute_pairs(expert_P, order_P, index_TK.shape[1], num_experts)
    # sent[e] is the number of local pairs for global expert e. The all-to-all transposes the counts: `received` has the
    # rows that each source rank sends to each local expert, ranks first.
    received = exchange(sent, [num_local_experts] * size, [num_local_experts] * size, group)()
    # The message sizes of the next all-to-all must be known on the host.
    of_experts = torch.stack([sent, received]).tolist()  # The only host synchronization.
    send, receive = (
        # Sum the counts of a rank's experts: 2 ranks with 2 experts each and counts [3, 1, 0, 2] give [4, 2].
        [sum(counts[first : first + num_local_experts]) for first in range(0, len(counts), num_local_experts)]
        for counts in of_experts
    )
    # Sum the counts of a local expert over the source ranks.
    arrivals_L = [sum(of_experts[1][expert::num_local_experts]) for expert in range(num_local_experts)]
    received_RL = received.view(size, num_local_experts)
    return Routes(order_P, token_P, place_P, received_RL, send, receive, arrivals_L, group)


def at_least_one_row(experts: LocalExperts, hidden_ND: Tensor, expert_N: Tensor) -> Tensor:
    """Call `experts` with at least one row.

    Without rows, it runs on a row of zeros and drops the result. Grouped GEMMs reject empty input, and every rank must
    produce the (zero) gradients that its group reduces.
    """
    if len(expert_N):
        return experts(hidden_ND, expert_N)
    # The sum of no rows is a row of zeros that stays connected to the graph.
    return experts(hidden_ND.sum(0, keepdim=True), expert_N.new_zeros(1))[:0]


class _Exchange(Function):
    """Differentiable all-to-all of rows. The backward sends gradients the opposite way."""

    @staticmethod
    def forward(ctx: Ctx, rows: Tensor, routes: Routes, there: bool) -> Tensor:
        ctx.way_back = routes.back if there else routes.there
        arrived = save_or_replay(lambda: (routes.there if there else routes.back)(rows)())
        return arrived.detach()  # A saved result must not keep the graph of its first use.

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way_back(grads[0])(), None, None


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Arriving:
    """Start an all-to-all of `rows`. `send` and `receive` are rows per rank. Without a group, returns `rows`."""
    if group is None:
        return Arriving(rows, rows, None)
    arriving, sent = rows.new_empty(sum(receive), *rows.shape[1:]), rows.contiguous()
    return Arriving(arriving, sent, dist.all_to_all_single(arriving, sent, receive, send, group=group, async_op=True))
