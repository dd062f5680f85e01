"""Online DPO: the best and the worst response of each group form a pair. Torch-free to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.objectives.base import RewardKL
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.preference_settings import SORTED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OnlineDPO(DPO):
    """Loss of `DPO` on pairs of the model's own samples (arXiv:2402.04792, algorithm 1).

    The response of a group with the highest reward is chosen, the one with the lowest is rejected. If rewards are
    equal, the earlier sample is used. Groups with equal rewards form no pair (`num_unused_groups`). Rewards include
    `rollout.overlong`. Sampling uses `rollout.temperature`. Log-probs, also of the reference, are at temperature 1.

    Both responses with their prompts share a row. Prompts can therefore have at most half of `data.seq_len` minus
    `rollout.max_new_tokens` tokens. Metrics: see `DPO`.
    """

    reward_kl: ClassVar[RewardKL | None] = None
    corrects_staleness: ClassVar[bool] = True
    """See `PolicyObjective`. A pair is compared with the reference, independent of the sampler."""

    samples_of_group: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss in SORTED or self.use_wpo_weighting:
            raise ConfigError(
                f"loss={self.loss} with use_wpo_weighting={self.use_wpo_weighting} is not supported with online DPO, "
                "because it needs log-probs of dataset pairs from before the update",
                code="unsupported_combination",
                keys=("loss", "use_wpo_weighting"),
                fix="objective.loss=sigmoid objective.use_wpo_weighting=false",
            )

    def select(self, rewards_N: Tensor, groups_N: Tensor, valid_N: Tensor) -> list[tuple[int, ...]]:
        """See `SelectingObjective`. Pairs with the chosen response first."""
        from automodel_cli.objectives.group_ranking import ranked_groups

        pairs: list[tuple[int, ...]] = []
        for indices in ranked_groups(rewards_N, groups_N, valid_N):
            lowest = min(rewards_N[n].item() for n in indices)
            if rewards_N[indices[0]].item() > lowest:
                pairs.append((indices[0], next(n for n in indices if rewards_N[n].item() == lowest)))
        return pairs
