"""Reward model objective: a score of a conversation, trained on pairs of a better and a worse one. Torch-free to
import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.value_checks import check_range
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class BradleyTerry:
    """Loss = mean over pairs of -log sigmoid(c - r - m) + `center_rewards_coef` x (c + r)^2.

    c and r are the values of the last token of the chosen and rejected conversation (arXiv:2203.02155, eq. 1;
    centering: arXiv:2312.09244). m is the pair's `margin` in the data if `margin` is set (arXiv:2307.09288, eq. 2), in
    units of the score. `center_rewards_coef` keeps scores near 0, because pairs determine only differences.

    Example: c = 2 and r = 0 without margin give a loss of log(1 + e^-2) = 0.127.

    Metrics are means over pairs of all ranks: `accuracy` (chosen above rejected; a tie is a miss), `score_chosen`,
    `score_rejected`, and `score_margin`, their difference.
    """

    margin: bool = False
    """Subtract each pair's `margin` column from the score difference (arXiv:2307.09288, eq. 2)."""
    center_rewards_coef: float = 0.0
    """Weight of (chosen + rejected score)^2, which keeps scores near 0 (arXiv:2312.09244)."""

    def __post_init__(self) -> None:
        check_range(
            "center_rewards_coef", self.center_rewards_coef, at_least=0, fix="objective.center_rewards_coef=0.01"
        )

    @property
    def needs(self) -> HeadRequest:
        """See `RequestingObjective`."""
        return HeadRequest(values=True, logprobs=False)

    @property
    def columns(self) -> frozenset[str]:
        """See `PreferenceObjective`."""
        return frozenset({"pairs_P2", "margins_P"} if self.margin else {"pairs_P2"})

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {
            "accuracy": Metric("num_pairs", shown=True),
            "score_chosen": Metric("num_pairs"),
            "score_rejected": Metric("num_pairs"),
            "score_margin": Metric("num_pairs", shown=True),
            "num_pairs": Metric(),
        }

    def weight(self, batch: Batch) -> Tensor:
        """Number of pairs whose responses both have label tokens."""
        from automodel_cli.objectives.preference_losses import valid_pairs

        return valid_pairs(batch).sum()

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        from torch.nn.functional import logsigmoid

        c_P, r_P, valid_P = self._scores(output, batch)
        above_P = c_P - r_P
        if self.margin:
            above_P = above_P - batch.extra["margins_P"]
        losses_P = -logsigmoid(above_P) + self.center_rewards_coef * (c_P + r_P).square()
        return (losses_P * valid_P).sum()

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        c_P, r_P, valid_P = self._scores(output, batch)
        values = {
            "accuracy": (c_P > r_P).float(),
            "score_chosen": c_P,
            "score_rejected": r_P,
            "score_margin": c_P - r_P,
        }
        return {**{name: (value_P * valid_P).sum() for name, value_P in values.items()}, "num_pairs": valid_P.sum()}

    def _scores(self, output: HeadOutput, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the two scores of each pair, and 1.0 if the pair counts."""
        from automodel_cli.objectives.preference_losses import valid_pairs
        from automodel_cli.objectives.segment_reduce import at_last_token

        assert output.values_BT is not None, "a reward model needs values"
        # [B, T] values -> [documents] -> [P, 2].
        scores_P2 = at_last_token(output.values_BT, batch)[batch.extra["pairs_P2"]]
        return scores_P2[:, 0], scores_P2[:, 1], valid_pairs(batch).float()
