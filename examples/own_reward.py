"""A reward of your own: the share of a response's letters that are vowels.

    automodel grpo llm -c quickstart_grpo rewards=exact \
        'rewards.vowels={_target_: own_reward.Vowels, weight: 0.5}' --trust-package own_reward

Without `rewards=exact` it takes the place of that default.
"""

from __future__ import annotations

from dataclasses import dataclass

from automodel_cli.rollout.rewards.base import Reward, RewardInput


@dataclass(frozen=True, kw_only=True)
class Vowels(Reward):
    """`letters` are counted; a response without any letter is worth 0."""

    letters: str = "aeiou"

    def score(self, sample: RewardInput) -> float:
        said = [letter for letter in sample.completion.lower() if letter.isalpha()]
        return sum(letter in self.letters for letter in said) / len(said) if said else 0.0
