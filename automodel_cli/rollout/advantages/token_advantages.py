"""Advantages per token: the reward of a sample at its last token, a KL term at each token, and values of a critic.

Ranks hold only the rows that they train on. Statistics are sums over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.objectives.base import RewardKL
from automodel_cli.objectives.gae import generalized_advantages, moments, whitened
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample


@dataclass(frozen=True)
class TokenAdvantages:
    """Settings of advantages per token: `gamma` and `lam` of GAE with the values `old_values_BT` of a `critic`,
    `whiten` over all tokens of the rollout, and the `kl` term of each token's reward."""

    gamma: float
    lam: float
    critic: bool
    whiten: bool
    kl: RewardKL | None

    def into(
        self, updates: Sequence[Minibatch], samples: Sequence[Sample], rewards_N: Tensor, mesh: Mesh
    ) -> tuple[list[Minibatch], Tensor]:
        """Return the minibatches with `advantages_BT` and, for a critic, `returns_BT`. Also return the mean advantage
        of each sample, float64 `[N]`, 0 for samples that are not trained. Collective."""
        advantages_of_updates = [self._of_update(update, samples, rewards_N) for update in updates]
        advantages = [advantages_BT for of_update in advantages_of_updates for advantages_BT, _ in of_update]
        labels = [batch.labels_BT.cpu() >= 0 for update in updates for batch in update.batches]
        generated = [a_BT[mask_BT] for a_BT, mask_BT in zip(advantages, labels, strict=True)]
        if self.whiten:
            local_moments = moments(torch.cat([torch.zeros(0, dtype=torch.float64), *generated]))
            total_3 = mesh.sum_over(mesh.dp, local_moments).cpu()
            advantages_of_updates = [
                [(whitened(a_BT, total_3), r_BT) for a_BT, r_BT in of_update] for of_update in advantages_of_updates
            ]
        made, sums_N = [], torch.zeros(len(samples), dtype=torch.float64)
        for update, of_update in zip(updates, advantages_of_updates, strict=True):
            masks = [batch.labels_BT.cpu() >= 0 for batch in update.batches]
            columns = [a_BT * mask_BT for (a_BT, _), mask_BT in zip(of_update, masks, strict=True)]
            for number, a_T in _of_samples(update, columns, samples):
                sums_N[number] = a_T.mean()
            made.append(update.with_column("advantages_BT", [column_BT.float() for column_BT in columns]))
            if self.critic:
                made[-1] = made[-1].with_column("returns_BT", [r_BT.float() for _, r_BT in of_update])
        return made, mesh.sum_over(mesh.dp, sums_N).cpu()

    def _of_update(
        self, update: Minibatch, samples: Sequence[Sample], rewards_N: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return advantages and returns of each microbatch, float64 `[B, T]`, 0 at tokens that were not generated."""
        out = []
        for batch, spread in zip(update.batches, update.spread, strict=True):
            advantages_BT, returns_BT = (torch.zeros(batch.shape, dtype=torch.float64) for _ in range(2))
            taken_BT = self._kl(batch)
            values_BT = (
                batch.extra["old_values_BT"].cpu().double() if self.critic else torch.zeros(batch.shape).double()
            )
            for row, first, number in spread:
                drawn_T = first + samples[number].generated_T().nonzero()[:, 0]
                rewards_T = -taken_BT[row, drawn_T]
                # The reward of a response belongs to its last token. KL terms belong to each token.
                rewards_T[-1] += rewards_N[number]
                values_T = values_BT[row, drawn_T]
                advantages_T = generalized_advantages(rewards_T, values_T, gamma=self.gamma, lam=self.lam)
                advantages_BT[row, drawn_T] = advantages_T
                # A = return - V, so return = A + V: the target of the critic.
                returns_BT[row, drawn_T] = advantages_T + values_T
            out.append((advantages_BT, returns_BT))
        return out

    def _kl(self, batch: Batch) -> Tensor:
        """Return the KL term of each token, float64 `[B, T]`."""
        if self.kl is None:
            return torch.zeros(batch.shape, dtype=torch.float64)
        old_BT, ref_BT = (batch.extra[f"{name}_logprobs_BT"].cpu() for name in ("old", "ref"))
        return self.kl.of(old_BT, ref_BT)


def _of_samples(
    update: Minibatch, columns: Sequence[Tensor], samples: Sequence[Sample]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each sample of an update, and the values at its generated tokens."""
    for column_BT, spread in zip(columns, update.spread, strict=True):
        for row, first, number in spread:
            yield number, column_BT[row, first + samples[number].generated_T().nonzero()[:, 0]]
