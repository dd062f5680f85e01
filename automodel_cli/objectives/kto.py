"""KTO (Kahneman-Tversky optimization): single responses labeled desirable or undesirable, without pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.objectives.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class KTO:
    """Loss = mean over responses of w (1 - sigmoid(beta (x - z))) if desirable, w (1 - sigmoid(beta (z - x))) if not.

    x is the sum of log-probs of the response minus that of the reference, z the reference point (arXiv:2402.01306).

    - `reference_point=kl`: z is the divergence from the reference on prompts with the response of another prompt. Each
      step measures it with one more forward pass over all its rows, so z is equal in every microbatch.
    - `reference_point=zero`: z = 0, without cost.

    The weights w compensate for unequal numbers of the two kinds. Metrics as in `DPO`, by kind of response.
    """

    beta: float = 0.1
    """Temperature of the log-ratio to the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable responses."""
    undesirable_weight: float = 1.0
    """Weight of undesirable responses."""
    reference_point: Literal["kl", "zero"] = "kl"
    """Reference point of the log-ratios: the `kl` estimated on mismatched pairs, or `zero`."""

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise ConfigError(
                    f"{name}={value} must be above 0",
                    code="out_of_range",
                    keys=(name,),
                    fix=f"objective.{name}={0.1 if name == 'beta' else 1.0}",
                )

    @property
    def columns(self) -> frozenset[str]:
        """See `PreferenceObjective`."""
        baseline = {"kl_baseline_1"} if self.reference_point == "kl" else set()
        return frozenset({"desirable_S", "ref_logprobs_BT", *baseline})

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {
            "rewards_chosen": Metric("num_desirable", shown=True),
            "rewards_rejected": Metric("num_undesirable", shown=True),
            "num_desirable": Metric(),
            "num_undesirable": Metric(),
        }

    def weight(self, batch: Batch) -> Tensor:
        """Number of labeled responses with label tokens."""
        good_S, bad_S = self._kinds(batch)
        return (good_S + bad_S).sum()

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        good_S, bad_S = self._kinds(batch)
        gain_S = log_ratios(output.logprobs_BT, batch)
        if self.reference_point == "kl":
            # [documents] - [1]. The baseline has no gradient: it was measured before the step.
            gain_S = gain_S - batch.extra["kl_baseline_1"]
        # Example: x = 3, z = 1, beta 0.1. Desirable: 1 - sigmoid(0.2) = 0.450. Undesirable: 1 - sigmoid(-0.2) = 0.550.
        # The slope is largest at x = z and vanishes far from it: a response that is already much likelier is not pushed
        # further.
        losses_S = self.desirable_weight * good_S * (1 - (self.beta * gain_S).sigmoid())
        losses_S = losses_S + self.undesirable_weight * bad_S * (1 - (-self.beta * gain_S).sigmoid())
        return losses_S.sum()

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        good_S, bad_S = self._kinds(batch)
        ratios_S = log_ratios(output.logprobs_BT, batch)
        return {
            "rewards_chosen": (ratios_S * good_S).sum(),
            "rewards_rejected": (ratios_S * bad_S).sum(),
            "num_desirable": good_S.sum(),
            "num_undesirable": bad_S.sum(),
        }

    def _kinds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return fp32 `[documents]` twice: 1 for desirable, and 1 for undesirable responses with a label token."""
        from automodel_cli.objectives.segment_reduce import labels_by_document

        label_S, has_labels_S = batch.extra["desirable_S"], labels_by_document(batch) > 0
        return ((label_S == 1) & has_labels_S).float(), ((label_S == 0) & has_labels_S).float()


def reference_point_sums(output: HeadOutput, batch: Batch) -> Tensor:
    """Return the sum of log-ratios over mismatched documents (a prompt with the response of another), and their number.

    `kl_baseline_1` is computed from these sums.
    """
    import torch

    from automodel_cli.objectives.segment_reduce import labels_by_document

    other_S = (batch.extra["desirable_S"] == -1) & (labels_by_document(batch) > 0)
    return torch.stack([(log_ratios(output.logprobs_BT, batch) * other_S).sum(), other_S.sum().float()])


def reference_point_of(sums_2: Tensor) -> Tensor:
    """Return `kl_baseline_1` from the `reference_point_sums` of a full step. At least 0, like a divergence."""
    total, count = sums_2.unbind()
    return (total / count.clamp(min=1)).clamp(min=0)[None]


def log_ratios(logprobs_BT: Tensor, batch: Batch) -> Tensor:
    """Return the sum of log-probs minus that of the reference, per document."""
    from automodel_cli.objectives.preference_losses import against_reference
    from automodel_cli.objectives.segment_reduce import sum_by_document

    return sum_by_document(against_reference(logprobs_BT, batch), batch)
