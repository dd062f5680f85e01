"""Received rows of tokens, sorted by local expert.

Shapes: N received rows, L local experts, R source ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.distributed.expert_parallel import permute
from automodel_cli.distributed.expert_parallel.token_dispatcher import Arriving, Routes


@dataclass(frozen=True)
class SortedRows:
    """Received rows, sorted by local expert.

    Example: 2 ranks send rows for local experts [0, 1 | 0, 0, 1]. `order_N` is [0, 2, 3, 1, 4], `expert_N` is [0, 0, 0,
    1, 1] and `ends_L` is [3, 5]. `place_N` is the inverse of `order_N`. Both are None if the rows are sorted on
    arrival.
    """

    routes: Routes
    order_N: Tensor | None
    place_N: Tensor | None
    expert_N: Tensor
    ends_L: Tensor

    @classmethod
    def of(cls, routes: Routes) -> SortedRows:
        received_RL = routes.received_RL
        if not routes.num_arrivals:  # Grouped GEMMs reject empty input. Use one row of zeros for expert 0.
            ends_L = torch.ones(received_RL.shape[1], dtype=torch.int32, device=received_RL.device)
            return cls(routes, None, None, received_RL.new_zeros(1), ends_L)
        # Received rows are ordered by source rank, then by expert. A grouped GEMM needs them ordered by expert.
        order_N, place_N, expert_N, ends_L = permute.permute_arrivals(received_RL, routes.num_arrivals)
        # With one rank or one local expert, the rows arrive in the order of experts.
        if 1 in received_RL.shape:
            return cls(routes, None, None, expert_N, ends_L)
        return cls(routes, order_N, place_N, expert_N, ends_L)

    @property
    def count_L(self) -> list[int]:
        """Number of rows of each local expert."""
        return self.routes.arrivals_L if self.routes.num_arrivals else [1] + [0] * (len(self.routes.arrivals_L) - 1)

    def by_expert(self, rows_N: Tensor) -> Tensor:
        """Sort received rows by expert."""
        if not len(rows_N):
            return rows_N.new_zeros(1, *rows_N.shape[1:])
        return rows_N if self.order_N is None else rows_N.index_select(0, self.order_N)

    def back(self, rows_N: Tensor) -> Arriving:
        """Send rows sorted by expert back to the ranks of their tokens, as sorted pairs. Collective."""
        if self.place_N is not None:
            rows_N = rows_N.index_select(0, self.place_N)
        return self.routes.back(rows_N[: self.routes.num_arrivals])

    def bias(self, biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the bias arguments of the gate."""
        return (biases[0], self.expert_N) if biases else ()

    def is_of_expert_NL(self, dtype: torch.dtype) -> Tensor:
        """Return a one-hot matrix `[N, L]`. A GEMM with it sums rows by expert in a deterministic order."""
        experts = torch.arange(len(self.ends_L), device=self.expert_N.device)
        return (self.expert_N[:, None] == experts).to(dtype)
