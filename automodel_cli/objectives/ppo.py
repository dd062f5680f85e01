"""PPO with a critic: the clipped policy gradient of `GRPO`, and a value head trained on returns. Torch-free import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.value_checks import check_range
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.base import Metric
from automodel_cli.objectives.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput
    from automodel_cli.objectives.policy_gradient import PolicyTerms


@dataclass(frozen=True)
class PPO(GRPO):
    """Loss of `GRPO` + `value_coef` x 1/2 max((V - R)^2, (V' - R)^2), with the same aggregation.

    V' is the value V clipped to within `value_clip_range` of the rollout's value (arXiv:1707.06347; the clipped value
    loss as in TRL and openai/baselines). The critic is a value head on the last hidden states of the policy.
    `rollout.advantage_estimator=critic` computes advantages and returns R. With `kl_placement=reward`, the KL is
    subtracted per token.

    Metrics in addition to those of GRPO: `value_loss`, `value_mean`, `return_mean`, and `value_clip_fraction`, the
    fraction of tokens whose clipped error is larger.
    """

    value_coef: float = 0.1
    """Weight of the value loss."""
    value_clip_range: float | None = 0.2
    """Clip of the value around the rollout's value (arXiv:1707.06347). null: no clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        note = ", or the critic is not trained"
        check_range("value_coef", self.value_coef, above=0, note=note, fix="objective.value_coef=0.1")
        note = ", or null for no clip"
        check_range(
            "value_clip_range", self.value_clip_range, above=0, note=note, fix="objective.value_clip_range=null"
        )

    @property
    def columns(self) -> frozenset[str]:
        """See `PolicyObjective`."""
        return super().columns | {"old_values_BT", "returns_BT"}

    @property
    def needs(self) -> HeadRequest:
        """See `RequestingObjective`."""
        return HeadRequest(entropy=True, values=True)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        means = {name: Metric("num_response_tokens") for name in ("value_mean", "return_mean", "value_clip_fraction")}
        per = "num_response_tokens" if self.loss_aggregation == "token" else "num_valid_samples"
        return {"value_loss": Metric(per, shown=True), **means, **super().metrics}

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        from automodel_cli.objectives.policy_gradient import PolicyTerms

        terms = PolicyTerms.of(self, output, batch)
        return terms.loss() + self.value_coef * terms.aggregate(self._value_losses(output, terms)[0])

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        from automodel_cli.objectives.policy_gradient import PolicyTerms

        terms = PolicyTerms.of(self, output, batch)
        losses_BT, clipped_BT = self._value_losses(output, terms)
        assert output.values_BT is not None
        means = {
            "value_mean": output.values_BT,
            "return_mean": batch.extra["returns_BT"],
            "value_clip_fraction": clipped_BT.float(),
        }
        sums = {name: value_BT.masked_fill(~terms.mask_BT, 0.0).sum() for name, value_BT in means.items()}
        return {"value_loss": terms.aggregate(losses_BT), **sums, **terms.metrics()}

    def _value_losses(self, output: HeadOutput, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
        """Return the loss per token, and whether the clipped error is the larger one."""
        import torch

        extra, mask_BT = terms.batch.extra, terms.mask_BT
        assert output.values_BT is not None, "a critic needs values"
        now_BT = output.values_BT.masked_fill(~mask_BT, 0.0)
        old_BT, returns_BT = (extra[name].masked_fill(~mask_BT, 0.0) for name in ("old_values_BT", "returns_BT"))
        errors_BT = (now_BT - returns_BT).square()
        if self.value_clip_range is None:
            return errors_BT / 2, torch.zeros_like(mask_BT)
        clipped_BT = now_BT.clamp(
            old_BT - self.value_clip_range, old_BT + self.value_clip_range
        )  # unchanged inside the range
        bounded_BT = (clipped_BT - returns_BT).square()
        return torch.maximum(errors_BT, bounded_BT) / 2, bounded_BT > errors_BT
