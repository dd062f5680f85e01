"""Clipped policy gradients on sampled responses: grpo, dapo, dr_grpo, gspo, cispo and reinforce are settings of one
objective (`conf/objective/` has each under its name). Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.base import Metric, RewardKL
from automodel_cli.objectives.policy_settings import PolicySettings

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class GRPO(PolicySettings):
    """Loss = mean of w x policy loss + `kl_coef` x KL - `entropy_coef` x entropy, over label tokens or over sequences,
    + `positive_nll_coef` x the mean NLL over label tokens of responses with a reward above 0.

    Policy loss of a token with advantage A and probability ratio q (now against the rollout's weights).
    `surrogate`: `clip` is max(-A q, -A clamp(q)), `cispo` is -A clamp(q) log p with the clamp detached, `reinforce`
    -A log p, `sapo` -A sigmoid(t (q - 1)) 4 / t, a soft gate in the clip's place, with t = `sapo_positive` where A > 0,
    else `sapo_negative` (arXiv:2511.20347). `ratio`: `token`; `sequence` (the exponential of the mean log-ratio of the
    response, GSPO, arXiv:2507.18071); `sequence_token` (the same number with each token's own gradient, GSPO-token, for
    advantages by token); `on_policy` (1 with a gradient: right for one update per rollout, and needs no
    `old_logprobs_BT`). The clamp is [1 - `clip_low`, 1 + `clip_high`]; `dual_clip_ratio` (above 1) also bounds the
    loss by
    -A x dual_clip_ratio where A < 0.

    `aggregation`: `token` divides by the label tokens of the step; `sequence` takes means over each response, then over
    responses; `max_tokens` divides sums by responses x `max_tokens`, a constant (dr_grpo).

    KL to the reference: `kl_type` k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, with d = reference - policy log-prob clamped
    to +-`kl_input_clamp`, the result to +-`kl_output_clamp` (None: no clamp). `kl_placement`: in the `loss`, or
    `reward`: the
    recipe takes it off the rewards and the loss has none. `kl_bias_correction` weighs it by policy / sampler
    probability.
    `kl_score_term`: the gradient of the KL in the loss is grad(KL) + KL x grad(log p), that of the sampled estimate;
    false leaves the second term out, as verl does, and TRL with `use_bias_correction_kl=false`.

    Correction of the difference between sampler and trainer, w = e^(old - sampler): `none`; `plain`; `truncate` (TIS)
    clamps w to [`sampler_correction_clip_min` or 0, `sampler_correction_clip_max`]; `icepop` (MIS) sets w to 0
    outside of them; `sequence_mask`
    drops responses whose geometric mean of w is outside, and weighs tokens by w. `sampler_correction_level`: each
    `token` has
    its own w, or all tokens of a response (`sequence`) the product of them; null: as `ratio` has it. Sources:
    docs/methods/grpo.md.

    The NLL of positive responses is divided by their own label tokens under every `aggregation` (arXiv:2504.05118). The
    entropy is exact, of the distribution that each response token was drawn from, and a metric in any case. Metrics:
    see `objectives/policy_gradient.py`.
    """

    @property
    def columns(self) -> frozenset[str]:
        """See `PolicyObjective`."""
        found = {"advantages_BT", "sampler_logprobs_BT"}
        found |= {"old_logprobs_BT"} if self.uses_old_logprobs else set()
        found |= {"ref_logprobs_BT"} if self.loss_kl_coef else set()
        found |= {"uncertain_BT"} if self.top_entropy_fraction is not None else set()
        return frozenset(found | ({"rewards_BT", "positive_scale_1"} if self.positive_nll_coef else set()))

    @property
    def needs(self) -> HeadRequest:
        """See `RequestingObjective`."""
        return HeadRequest(entropy=True)

    @property
    def reward_kl(self) -> RewardKL | None:
        """See `PolicyObjective`."""
        if self.kl_placement == "loss":
            return None
        return RewardKL(self.kl_coef, self.kl_type, self.kl_input_clamp, self.kl_output_clamp)

    @property
    def corrects_staleness(self) -> bool:
        """See `PolicyObjective`."""
        return self.sampler_correction != "none"

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        from automodel_cli.objectives.policy_gradient import policy_metrics

        return policy_metrics(self)

    def weight(self, batch: Batch) -> Tensor:
        """Label tokens; for the other aggregations responses with label tokens."""
        from automodel_cli.objectives.policy_gradient import num_sequences

        return batch.num_label_tokens if self.loss_aggregation == "token" else num_sequences(batch)

    def term_weights(self, batch: Batch) -> Mapping[str, Tensor]:
        """See `TermWeights`."""
        from automodel_cli.objectives.policy_gradient import POSITIVE_SCALE, num_positive_tokens

        return {POSITIVE_SCALE: num_positive_tokens(batch)} if self.positive_nll_coef else {}

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        from automodel_cli.objectives.policy_gradient import PolicyTerms

        return PolicyTerms.of(self, output, batch).loss()

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        from automodel_cli.objectives.policy_gradient import PolicyTerms

        return PolicyTerms.of(self, output, batch).metrics()
