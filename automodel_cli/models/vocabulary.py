"""The rows of a head's matrix that this rank has: all of them, or its shard under tensor parallelism.

Shards meet in one small exchange per chunk of tokens: log-sum-exp and the label's logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import compat


@dataclass(frozen=True)
class Vocabulary:
    """Tokens `start` to `start + size` belong to this rank, the others to the other ranks of `group`.

    `group` None: this rank has all. Methods with a group are collective over it.
    """

    start: int = 0
    size: int | None = None
    group: dist.ProcessGroup | None = None

    def local(self, labels_S: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label in this rank's logits (0 where it has none), and whether it has one."""
        if self.size is None:
            return labels_S, torch.ones_like(labels_S, dtype=torch.bool)
        index_S = labels_S - self.start
        is_own_S = (index_S >= 0) & (index_S < self.size)
        return torch.where(is_own_S, index_S, 0), is_own_S

    def statistics(self, logits_SV: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor]:
        """Of fp32 logits over this rank's tokens: log-sum-exp over all tokens, and the label's logit."""
        lse_S = torch.logsumexp(logits_SV, -1)
        index_S, is_own_S = self.local(labels_S)
        picked_S = logits_SV.gather(-1, index_S[:, None])[:, 0].where(is_own_S, 0)
        if self.group is None:
            return lse_S, picked_S
        ranks = dist.get_world_size(self.group)
        of_ranks = logits_SV.new_empty(ranks, 2, len(labels_S))
        dist.all_gather_into_tensor(of_ranks.flatten(0, 1), torch.stack([lse_S, picked_S]), group=self.group)
        return torch.logsumexp(of_ranks[:, 0], 0), of_ranks[:, 1].sum(0)

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


WHOLE = Vocabulary()


def vocabulary_of(weight_VD: Tensor) -> tuple[Tensor, Vocabulary]:
    """A head's weight as plain local rows, inside autograd, and which ones they are."""
    if not compat.is_dtensor(weight_VD):
        return weight_VD, WHOLE
    mesh, (placement, *others) = weight_VD.device_mesh, weight_VD.placements  # type: ignore[attr-defined]
    assert not others, "the head's weight is still sharded for data parallelism: it belongs to the part's root group"
    if placement.is_replicate():
        return weight_VD.to_local(), WHOLE  # type: ignore[attr-defined]
    if not placement.is_shard(0):
        raise ConfigError(
            f"the head's weight is sharded as {placement}: log-probs need its rows, the vocabulary, sharded",
            keys=("parallelizer.tp_plan",),
            fix="colwise_gather_output for the output embeddings",
        )
    local_VD: Tensor = weight_VD.to_local()  # type: ignore[attr-defined]
    size = len(local_VD)
    assert size * mesh.size() == len(weight_VD), "vocabulary shards must be equal"
    return local_VD, Vocabulary(mesh.get_local_rank() * size, size, mesh.get_group())
