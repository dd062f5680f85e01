"""Compute advantages of samples and build the minibatches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.objectives.advantages import Advantages
from automodel_cli.objectives.base import PolicyObjective, RewardKL, selection_of
from automodel_cli.rollout.advantages import batch, critic, group, own
from automodel_cli.rollout.advantages.base import RewardedSamples
from automodel_cli.rollout.advantages.token_advantages import TokenAdvantages
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.minibatches.logprob_scorer import Scorer
from automodel_cli.rollout.minibatches.router_replay import RoutingReplay
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.timers import StepTimers
from automodel_cli.rollout.types import Sample

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True)
class TrainingBatches:
    """Minibatches of this rank with all columns of the objective, and values of the N samples.

    `advantages_N`, `differs_N`: advantage of each sample, and whether the rewards of its group differ. `trained`:
    indices of the trained samples. `gaps`: difference between the routed experts of trainer and sampler (empty without
    `replay_routing`). `scored`: whether a model scored the tokens before the first update.
    """

    updates: list[Minibatch]
    advantages_N: Tensor
    differs_N: Tensor
    trained: list[int]
    gaps: dict[str, float]
    scored: bool


class AdvantageEstimator:
    """Advantages by the rules of a run's config."""

    def __init__(
        self,
        session: Trainer,
        config: RolloutConfig,
        objective: PolicyObjective,
        plan: PackingConfig,
        scorer: Scorer,
        replay: RoutingReplay | None,
    ):
        self.config, self.objective, self.mesh = config, objective, session.mesh
        self._plan, self._scorer, self._replay = plan, scorer, replay
        self._num_updates = config.samples_per_step // session.recipe.train.global_batch_size
        self._by_token = self._token_advantages()

    def filter_groups(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Return the groups with different rewards, and the others."""
        differs_N = self._advantages(samples, _totals(samples)).differs_N.tolist()
        pairs = list(zip(samples, differs_N, strict=True))
        return [sample for sample, differs in pairs if differs], [sample for sample, differs in pairs if not differs]

    def build_minibatches(self, samples: list[Sample], phases: StepTimers) -> TrainingBatches:
        """Build the minibatches of a step. Groups with equal rewards and invalid samples are excluded. Log-probs of
        the rest are computed before the first update, under the sampled distribution. Collective."""
        # By the rewards before shaping: a length penalty alone must not make a group of equal answers worth training.
        differs_N = self._advantages(samples, _totals(samples)).differs_N
        rewards_N = self._shaped_rewards(samples)
        units = self._units(samples, rewards_N, differs_N)
        mesh = self.mesh
        updates = pack_minibatches(
            samples, units, self._num_updates, self._plan, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size
        )
        if "pairs_P2" in self.objective.columns:
            updates = [update.with_pairs(units) for update in updates]
        with phases("score"):
            planned, updates = updates, self._scorer.scored(updates, samples)
            gaps = {} if self._replay is None else self._replay.gaps(updates, self._scorer)
        scored = any(update is not bare for update, bare in zip(updates, planned, strict=True))
        if self._by_token is not None:
            updates, advantages_N = self._by_token.into(updates, samples, rewards_N, mesh)
        else:
            if (kl := self.objective.reward_kl) is not None:
                # A rank knows the KL of its own rows only. A group may have samples on several ranks, so the sum comes
                # first.
                rewards_N -= mesh.sum_over(mesh.dp, kl_sums(updates, samples, kl)).cpu()
            advantages_N = self._advantages(samples, rewards_N).advantages_N
            updates = [update.with_values("advantages_BT", advantages_N.float(), samples) for update in updates]
        trained = [number for numbers in units for number in numbers]
        return TrainingBatches(updates, advantages_N, differs_N, trained, gaps, scored)

    def _shaped_rewards(self, samples: Sequence[Sample]) -> Tensor:
        overlong, limit = self.config.overlong, self.config.max_new_tokens
        rewards = [overlong.shaped(s.score.total, s.num_generated, s.truncated, limit) for s in samples]
        return torch.tensor(rewards, dtype=torch.float64)

    def _units(self, samples: Sequence[Sample], rewards_N: Tensor, differs_N: Tensor) -> Sequence[Sequence[int]]:
        """Return the indices of the samples to train on. The samples of a unit must share a sequence."""
        valid_N = self._valid(samples)
        if (selecting := selection_of(self.objective)) is not None:
            spoken_N = torch.tensor([sample.num_generated > 0 for sample in samples])
            return selecting.select(rewards_N, _groups(samples), valid_N & spoken_N)
        by_group = self._by_token is None and "advantages_BT" in self.objective.columns
        return [(number,) for number in (valid_N & (differs_N | (not by_group))).nonzero()[:, 0].tolist()]

    def _valid(self, samples: Sequence[Sample]) -> Tensor:
        cut = self.config.overlong.filter
        return torch.tensor([s.score.valid and not (cut and s.truncated) for s in samples])

    def _advantages(self, samples: Sequence[Sample], rewards_N: Tensor) -> Advantages:
        rewarded = RewardedSamples(rewards_N, _groups(samples), self._valid(samples), samples)
        chosen = self.config.advantage_estimator
        return group.estimate(self.config, rewarded) if isinstance(chosen, str) else own.estimate(chosen, rewarded)

    def _token_advantages(self) -> TokenAdvantages | None:
        """Return the estimator of advantages per token, or None if each sample has one advantage."""
        chosen, kl = self.config.advantage_estimator, self.objective.reward_kl
        if chosen == "critic":
            return critic.estimator(self.config, kl)
        return batch.estimator(self.config, kl) if chosen == "batch" else None


def _groups(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([sample.place for sample in samples])


def _totals(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([sample.score.total for sample in samples], dtype=torch.float64)


def kl_sums(updates: Sequence[Minibatch], samples: Sequence[Sample], kl: RewardKL) -> Tensor:
    """Return the KL term of each sample's reward on this rank, summed over its tokens. Float64 `[N]`, 0 for other
    samples."""
    sums_N = torch.zeros(len(samples), dtype=torch.float64)
    for update in updates:
        for microbatch, spread in zip(update.batches, update.spread, strict=True):
            old_BT, ref_BT = (microbatch.extra[f"{name}_logprobs_BT"].cpu() for name in ("old", "ref"))
            kl_BT = kl.of(old_BT, ref_BT)
            for row, first, number in spread:
                sample = samples[number]
                kl_T = kl_BT[row, first : first + len(sample.tokens)]
                sums_N[number] = kl_T[sample.generated_T()].sum()
    return sums_N
