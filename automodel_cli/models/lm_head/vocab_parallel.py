"""Vocabulary of a rank: all rows of the head's weight, or its tensor-parallel shard.

Ranks exchange few numbers per token and chunk: the log-sum-exp, the logits of the requested tokens, and the entropy if
requested. Example: with 2 ranks and log-sum-exps L0 and L1, the full log-sum-exp is logaddexp(L0, L1).
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
    """fp32 statistics per token: log-sum-exp of all logits, log-probs of the given ids, entropy if requested."""

    lse_S: Tensor
    logprobs_SN: Tensor
    entropy_S: Tensor | None


@dataclass(frozen=True)
class Vocabulary:
    """The tokens `start` to `start + size` of this rank. Other ranks of `group` have the rest.

    If `group` is None, this rank has all tokens. Methods are collective over the group.
    """

    start: int = 0
    size: int | None = None
    group: dist.ProcessGroup | None = None

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each token in the local logits (0 if not local), and whether it is local."""
        index = ids - self.start
        is_own = (index >= 0) if self.size is None else (index >= 0) & (index < self.size)
        return torch.where(is_own, index, 0), is_own

    def columns(self, ids: Tensor) -> Tensor:
        """Return the column of each token in the local logits, -1 if it is not local or the id is negative."""
        index, is_own = self.local(ids)
        return index.where(is_own & (ids >= 0), -1).contiguous()

    def statistics(
        self, logits_SV: Tensor, ids_SN: Tensor, *, entropy: bool, masked: bool = False, overwrite: bool = False
    ) -> Statistics:
        """Return the statistics over the full vocabulary from local fp32 logits.

        Args:
            ids_SN: requested tokens. A negative id has log-prob 0.
            masked: some logits are -inf.
            overwrite: the logits may be overwritten.
        """
        lse_S = torch.logsumexp(logits_SV, -1)
        index_SN, is_own_SN = self.local(ids_SN)
        picked_SN = logits_SV.gather(-1, index_SN).where(is_own_SN, 0)
        own = _entropy(logits_SV, lse_S, masked, overwrite) if entropy else None
        return self.combine(lse_S, picked_SN, own, ids_SN)

    def combine(self, lse_S: Tensor, picked_SN: Tensor, entropy_S: Tensor | None, ids_SN: Tensor) -> Statistics:
        """Return the statistics over the full vocabulary from local statistics.

        `picked_SN`: logits of the local ids, 0 for the others.
        """
        if self.group is not None:
            lse_S, picked_SN, entropy_S = self._combine(lse_S, picked_SN, entropy_S)
        return Statistics(lse_S, (picked_SN - lse_S[:, None]).where(ids_SN >= 0, 0), entropy_S)

    def _combine(
        self, lse_S: Tensor, picked_SN: Tensor, entropy_S: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Combine the ranks. For the probability w of a rank, H = sum_ranks w (H_rank - log w)."""
        # One all-gather of (N + 1 or N + 2) x S numbers instead of S x V logits.
        # Example: logits ln 7, ln 2 on rank 0 and ln 1 on rank 1. L0 = ln 9, L1 = 0, so L = ln 10, and the shares are w
        # = 0.9 and 0.1. The local entropies are 0.530 and 0. H = 0.9 (0.530 - ln 0.9) + 0.1 (0 - ln 0.1) = 0.802, the
        # entropy of (0.7, 0.2, 0.1).
        local_stats = [lse_S, *picked_SN.unbind(1)] + ([] if entropy_S is None else [entropy_S])
        all_ranks = torch.empty(dist.get_world_size(self.group), len(local_stats), len(lse_S), device=lse_S.device)
        dist.all_gather_into_tensor(all_ranks.flatten(0, 1), torch.stack(local_stats), group=self.group)
        lse_RS = all_ranks[:, 0]
        lse_S = torch.logsumexp(lse_RS, 0)
        # Exactly one rank has each id, the others contribute 0.
        picked_SN = all_ranks[:, 1 : 1 + picked_SN.shape[1]].sum(0).t()
        if entropy_S is not None:
            log_w_RS = lse_RS - lse_S
            terms_RS = log_w_RS.exp() * (all_ranks[:, -1] - log_w_RS)
            entropy_S = terms_RS.where(log_w_RS.isfinite(), 0).sum(0)  # all tokens of a rank may be filtered
        return lse_S, picked_SN, entropy_S

    def topk(self, logits_SV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest logits over the full vocabulary in descending order, and their tokens."""
        # A shard may have fewer than k tokens.
        values, ids = logits_SV.topk(min(k, logits_SV.shape[-1]))
        if self.group is None:
            return values, ids
        ids = ids + self.start
        ranks = range(dist.get_world_size(self.group))
        all_values, all_ids = ([torch.empty_like(t) for _ in ranks] for t in (values, ids))
        dist.all_gather(all_values, values.contiguous(), group=self.group)
        dist.all_gather(all_ids, ids, group=self.group)
        # The k largest of all are among the k largest of each rank.
        values, index = torch.cat(all_values, -1).topk(k)
        return values, torch.cat(all_ids, -1).gather(-1, index)

    def gather(self, logits_SV: Tensor) -> Tensor:
        """Return the logits over the full vocabulary."""
        if self.group is None:
            return logits_SV
        all_ranks = [torch.empty_like(logits_SV) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(all_ranks, logits_SV.contiguous(), group=self.group)
        return torch.cat(all_ranks, dim=-1)

    def own(self, logits_SV: Tensor) -> Tensor:
        """Return the columns of this rank."""
        return logits_SV if self.size is None else logits_SV.narrow(-1, self.start, self.size).contiguous()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks as a new tensor."""
        if self.group is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total


def _entropy(logits_SV: Tensor, lse_S: Tensor, masked: bool, overwrite: bool) -> Tensor:
    """Return -sum p log p of the softmax. The entropy is 0 if all logits of a row are -inf."""
    # Every token of this shard may be filtered. -inf - (-inf) would be nan.
    if masked:
        lse_S = lse_S.where(lse_S.isfinite(), 0)
    logp_SV = logits_SV.sub_(lse_S[:, None]) if overwrite else logits_SV - lse_S[:, None]
    p_SV = logp_SV.exp()
    if masked:
        logp_SV = logp_SV.masked_fill_(p_SV == 0, 0)
    return -torch.einsum("sv,sv->s", p_SV, logp_SV)


WHOLE = Vocabulary()


def vocabulary_of(weight_VD: Tensor) -> tuple[Tensor, Vocabulary]:
    """Return the local rows of a head's weight inside autograd, and their vocabulary."""
    if not transformers_compat.is_dtensor(weight_VD):
        return weight_VD, WHOLE
    mesh, (placement, *others) = weight_VD.device_mesh, weight_VD.placements
    assert not others, "the weight of the head must be unsharded: keep it in the root FSDP unit of the part"
    if placement.is_replicate():
        return weight_VD.to_local(), WHOLE
    if not placement.is_shard(0):
        raise ConfigError(
            f"tp_plan shards the weight of the head as {placement}. It must be Shard(dim=0), the vocabulary dimension, "
            "or Replicate()",
            code="not_supported",
            keys=("parallelizer.tp_plan",),
            fix="colwise_gather_output for the output embeddings",
        )
    local_VD: Tensor = weight_VD.to_local()
    size = len(local_VD)
    assert size * mesh.size() == len(weight_VD), "vocabulary shards must be equal"
    return local_VD, Vocabulary(mesh.get_local_rank() * size, size, mesh.get_group())
