"""The rows of a head's matrix that this rank has: all of them, or its shard under tensor parallelism.

Shards meet in one small exchange per chunk of tokens: log-sum-exp, the logits of the tokens that are asked about, and,
for those who want it, the entropy of the rank's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat


class Statistics(NamedTuple):
    """fp32 by token: log-sum-exp of all logits, log-probs of the given ids, entropy if it was asked for."""

    lse_S: Tensor
    logprobs_SN: Tensor
    entropy_S: Tensor | None


@dataclass(frozen=True)
class Vocabulary:
    """Tokens `start` to `start + size` belong to this rank, the others to the other ranks of `group`.

    `group` None: this rank has all. Methods with a group are collective over it.
    """

    start: int = 0
    size: int | None = None
    group: dist.ProcessGroup | None = None

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each token in this rank's logits (0 where it has none), and whether it has one."""
        index = ids - self.start
        is_own = (index >= 0) if self.size is None else (index >= 0) & (index < self.size)
        return torch.where(is_own, index, 0), is_own

    def columns(self, ids: Tensor) -> Tensor:
        """Column of each token in this rank's logits, -1 where it has none or the id is none."""
        index, is_own = self.local(ids)
        return index.where(is_own & (ids >= 0), -1).contiguous()

    def statistics(
        self, logits_SV: Tensor, ids_SN: Tensor, *, entropy: bool, masked: bool = False, overwrite: bool = False
    ) -> Statistics:
        """Of the distribution over all tokens that fp32 logits over this rank's tokens are a part of.

        An id below 0 is no token: log-prob 0. `masked`: some logits are -inf. `overwrite`: the logits may be lost.
        """
        lse_S = torch.logsumexp(logits_SV, -1)
        index_SN, is_own_SN = self.local(ids_SN)
        picked_SN = logits_SV.gather(-1, index_SN).where(is_own_SN, 0)
        own = _entropy(logits_SV, lse_S, masked, overwrite) if entropy else None
        return self.whole(lse_S, picked_SN, own, ids_SN)

    def whole(self, lse_S: Tensor, picked_SN: Tensor, entropy_S: Tensor | None, ids_SN: Tensor) -> Statistics:
        """Of all tokens, from those of this rank's: their log-sum-exp and entropy, and the logits of the ids that are
        its own (0 of the others)."""
        if self.group is not None:
            lse_S, picked_SN, entropy_S = self._combine(lse_S, picked_SN, entropy_S)
        return Statistics(lse_S, (picked_SN - lse_S[:, None]).where(ids_SN >= 0, 0), entropy_S)

    def _combine(
        self, lse_S: Tensor, picked_SN: Tensor, entropy_S: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """From the ranks' shares: with w a rank's probability, H = sum of w (H of the rank - log w)."""
        mine = [lse_S, *picked_SN.unbind(1)] + ([] if entropy_S is None else [entropy_S])
        of_ranks = torch.empty(dist.get_world_size(self.group), len(mine), len(lse_S), device=lse_S.device)
        dist.all_gather_into_tensor(of_ranks.flatten(0, 1), torch.stack(mine), group=self.group)
        of_rank_RS = of_ranks[:, 0]
        lse_S = torch.logsumexp(of_rank_RS, 0)
        picked_SN = of_ranks[:, 1 : 1 + picked_SN.shape[1]].sum(0).t()
        if entropy_S is not None:
            log_w_RS = of_rank_RS - lse_S
            terms_RS = log_w_RS.exp() * (of_ranks[:, -1] - log_w_RS)
            entropy_S = terms_RS.where(log_w_RS.isfinite(), 0).sum(0)  # a rank may have filtered tokens only
        return lse_S, picked_SN, entropy_S

    def topk(self, logits_SV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits over all tokens, largest first, and whose they are."""
        values, ids = logits_SV.topk(min(k, logits_SV.shape[-1]))
        if self.group is None:
            return values, ids
        ids = ids + self.start
        ranks = range(dist.get_world_size(self.group))
        all_values, all_ids = ([torch.empty_like(t) for _ in ranks] for t in (values, ids))
        dist.all_gather(all_values, values.contiguous(), group=self.group)
        dist.all_gather(all_ids, ids, group=self.group)
        values, index = torch.cat(all_values, -1).topk(k)
        return values, torch.cat(all_ids, -1).gather(-1, index)

    def gather(self, logits_SV: Tensor) -> Tensor:
        """Logits over all tokens."""
        if self.group is None:
            return logits_SV
        of_ranks = [torch.empty_like(logits_SV) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(of_ranks, logits_SV.contiguous(), group=self.group)
        return torch.cat(of_ranks, dim=-1)

    def own(self, logits_SV: Tensor) -> Tensor:
        """The columns of this rank."""
        return logits_SV if self.size is None else logits_SV.narrow(-1, self.start, self.size).contiguous()

    def sum(self, tensor: Tensor) -> Tensor:
        """Over the ranks, as a new tensor."""
        if self.group is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total


def _entropy(logits_SV: Tensor, lse_S: Tensor, masked: bool, overwrite: bool) -> Tensor:
    """-sum of p log p of the softmax of these logits; 0 for a row of -inf alone."""
    if masked:
        lse_S = lse_S.where(lse_S.isfinite(), 0)
    logp_SV = logits_SV.sub_(lse_S[:, None]) if overwrite else logits_SV - lse_S[:, None]
    p_SV = logp_SV.exp()
    if masked:
        logp_SV = logp_SV.masked_fill_(p_SV == 0, 0)
    return -torch.einsum("sv,sv->s", p_SV, logp_SV)


WHOLE = Vocabulary()


def vocabulary_of(weight_VD: Tensor) -> tuple[Tensor, Vocabulary]:
    """A head's weight as plain local rows, inside autograd, and which ones they are."""
    if not transformers_compat.is_dtensor(weight_VD):
        return weight_VD, WHOLE
    mesh, (placement, *others) = weight_VD.device_mesh, weight_VD.placements  # type: ignore[attr-defined]
    assert not others, "the head's weight is still sharded for data parallelism: it belongs to the part's root group"
    if placement.is_replicate():
        return weight_VD.to_local(), WHOLE  # type: ignore[attr-defined]
    if not placement.is_shard(0):
        raise ConfigError(
            f"tp_plan shards the weight of the head as {placement}. It must be Shard(dim=0), the vocabulary dimension, "
            "or Replicate()",
            code="not_supported",
            keys=("parallelizer.tp_plan",),
            fix="colwise_gather_output for the output embeddings",
        )
    local_VD: Tensor = weight_VD.to_local()  # type: ignore[attr-defined]
    size = len(local_VD)
    assert size * mesh.size() == len(weight_VD), "vocabulary shards must be equal"
    return local_VD, Vocabulary(mesh.get_local_rank() * size, size, mesh.get_group())
