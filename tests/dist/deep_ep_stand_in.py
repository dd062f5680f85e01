"""The part of `deep_ep.Buffer` that we call, with the contract that its documentation states, over any process group.

`dispatch` brings a token once to every rank that has some of its experts, with local expert numbers (-1: elsewhere) and
weights; `combine` sums what those ranks return for it. Given a handle, `dispatch` takes the same way again.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.distributed as dist


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @staticmethod
    def get_dispatch_config(num_ranks):
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        self.num_local = num_experts // self.size
        ranks = torch.arange(self.size)
        is_in_rank = (topk_idx[:, :, None] // self.num_local == ranks).any(1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return is_in_rank.sum(0), None, per_expert, is_in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        *,
        topk_idx=None,
        topk_weights=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
    ):
        everyone = self._gathered(x)
        if handle is not None:
            received, _ = handle
            return self._rows(everyone, received, x), None, None, None, None, None
        going = self._gathered(is_token_in_rank)
        received = [(r, t) for r in range(self.size) for t in range(len(going[r])) if going[r][t, self.rank]]
        indices, weights = self._gathered(topk_idx), self._gathered(topk_weights)
        index = self._rows(indices, received, topk_idx) - self.rank * self.num_local
        elsewhere = (index < 0) | (index >= self.num_local)
        index = index.masked_fill(elsewhere, -1)
        weight = self._rows(weights, received, topk_weights).masked_fill(elsewhere, 0.0)
        return self._rows(everyone, received, x), index, weight, None, (received, len(x)), None

    def combine(self, x, handle, *, topk_weights=None):
        received, num_tokens = handle
        total = torch.zeros(num_tokens, x.shape[1])
        weights = None if topk_weights is None else torch.zeros(num_tokens, topk_weights.shape[1])
        for places, rows, row_weights in self._gathered((received, x, topk_weights)):
            for i, (rank, token) in enumerate(places):
                if rank == self.rank:
                    total[token] += rows[i]
                    if weights is not None:
                        weights[token] += row_weights[i]
        return total.to(x.dtype), weights, None

    def _gathered(self, value):
        everyone = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    @staticmethod
    def _rows(of_ranks, places, like):
        return torch.stack([of_ranks[r][t] for r, t in places]) if places else like[:0]


def install():
    """As `import deep_ep` finds it, in this process."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer
    sys.modules["deep_ep"] = module
