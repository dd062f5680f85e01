"""Rejection sampling: trains on the best responses of each group like on dataset rows. Torch-free to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.value_checks import check_range
from automodel_cli.objectives.base import Metric, RewardKL

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class BestOfN:
    """Loss = mean NLL of the label tokens of each group's `num_kept` best responses (RAFT, arXiv:2304.06767, algorithm
    1).

    If rewards are equal, earlier samples are selected. With `threshold`, only responses with a larger reward are
    selected, so a group without a good response is skipped. Rewards include `rollout.overlong`. Sampling uses
    `rollout.temperature`. The NLL is at temperature 1.

    Metrics: `nll`, the mean over label tokens, and `num_selected_tokens`, their number.
    """

    reward_kl: ClassVar[RewardKL | None] = None
    corrects_staleness: ClassVar[bool] = True
    """See `PolicyObjective`. A good response is a valid target from any sampler."""

    num_kept: int = 1
    """Best responses of each group to train on (RAFT, arXiv:2304.06767)."""
    threshold: float | None = None
    """Train only on responses with a reward above this. null: no bound."""

    def __post_init__(self) -> None:
        check_range("num_kept", self.num_kept, at_least=1, fix="objective.num_kept=1")

    @property
    def columns(self) -> frozenset[str]:
        """See `PolicyObjective`."""
        return frozenset()

    @property
    def samples_of_group(self) -> int:
        """See `SelectingObjective`."""
        return self.num_kept

    def select(self, rewards_N: Tensor, groups_N: Tensor, valid_N: Tensor) -> list[tuple[int, ...]]:
        """See `SelectingObjective`. Each sample has its own row."""
        from automodel_cli.objectives.group_ranking import ranked_groups

        chosen = []
        for indices in ranked_groups(rewards_N, groups_N, valid_N):
            good = [n for n in indices if self.threshold is None or rewards_N[n].item() > self.threshold]
            chosen += sorted(good[: self.num_kept])
        return [(index,) for index in chosen]

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {"nll": Metric("num_selected_tokens", shown=True), "num_selected_tokens": Metric()}

    def weight(self, batch: Batch) -> Tensor:
        """Number of label tokens."""
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return -output.logprobs_BT.sum()

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        return {"nll": self(output, batch), "num_selected_tokens": batch.num_label_tokens.float()}
