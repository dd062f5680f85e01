"""Clipped policy gradients on sampled responses: GRPO, DAPO, Dr. GRPO, GSPO, CISPO and REINFORCE. Torch-free to import.

They are settings of one objective. `conf/objective/` contains a config for each name.
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
    """Loss = mean of w x policy loss + `kl_coef` x KL - `entropy_coef` x entropy + `positive_nll_coef` x positive NLL.

    The mean is over label tokens or sequences (`loss_aggregation`). Example: A = 1, q = 1.5 and clip 0.2 give max(-1.5,
    -1.2) = -1.2 without gradient, because the probability is high enough already. Sources: docs/methods/grpo.md.

    `policy_loss` of a token with advantage A and importance ratio q (current / rollout probability):

    - `clip`: max(-A q, -A clamp(q)). The clamp is [1 - `clip_low`, 1 + `clip_high`]. If A < 0, `dual_clip_ratio` (above
      1) bounds the loss by -A x dual_clip_ratio.
    - `cispo`: -A clamp(q) log p with a detached clamp.
    - `reinforce`: -A log p.
    - `sapo`: -A sigmoid(t (q - 1)) 4 / t, a soft gate, with t = `sapo_positive` if A > 0, else `sapo_negative`
      (arXiv:2511.20347).

    `importance_sampling_level`:

    - `token`: q of the token.
    - `sequence`: exponential of the mean log-ratio of the response (GSPO, arXiv:2507.18071).
    - `sequence_token`: the same value with the gradient of each token, for advantages per token (GSPO-token).
    - `on_policy`: 1 with a gradient. Supports one update per rollout and needs no `old_logprobs_BT`.

    `loss_aggregation`:

    - `token`: divide by the label tokens of the step.
    - `sequence`: mean over each response, then over responses.
    - `constant`: divide by responses x `normalization_length` (Dr. GRPO).

    KL to the reference, with d = reference - policy log-prob clamped to +-`kl_input_clamp`:

    - `kl_type`: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, clamped to +-`kl_output_clamp`. None: no clamp.
    - `kl_placement`: in the `loss`, or subtracted from the `reward` by the recipe.
    - `kl_bias_correction`: weight by policy / sampler probability.
    - `kl_score_term`: true gives the KL in the loss the gradient of the sampled estimate, grad(KL) + KL x grad(log p).
      false omits the second term, like verl, and TRL with `use_bias_correction_kl=false`.

    `sampler_correction` of the difference between trainer and sampler, w = e^(old - sampler), with bounds
    `sampler_correction_clip_min` (default 0) and `sampler_correction_clip_max`:

    - `none`: 1.
    - `importance`: w.
    - `truncate` (TIS): w clamped to the bounds.
    - `icepop` (MIS): w, 0 outside the bounds.
    - `sequence_mask`: w, 0 for responses whose geometric mean of w is outside the bounds.

    `sampler_correction_level`: w per `token`, or its product over the response (`sequence`). null: as
    `importance_sampling_level`.

    The NLL of positive responses (reward above 0) is divided by their own label tokens (arXiv:2504.05118). The entropy
    is exact, of the sampling distribution of each token, and always reported. Metrics: see
    `objectives/policy_gradient.py`.
    """

    @property
    def columns(self) -> frozenset[str]:
        """See `PolicyObjective`."""
        columns = {"advantages_BT", "sampler_logprobs_BT"}
        columns |= {"old_logprobs_BT"} if self.uses_old_logprobs else set()
        columns |= {"ref_logprobs_BT"} if self.loss_kl_coef else set()
        columns |= {"uncertain_BT"} if self.top_entropy_fraction is not None else set()
        return frozenset(columns | ({"rewards_BT", "positive_scale_1"} if self.positive_nll_coef else set()))

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
        """Number of label tokens. With other aggregations: number of responses with label tokens."""
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
