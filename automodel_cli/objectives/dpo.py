"""Preference pairs (DPO and variants): raise the likelihood of chosen over rejected responses, relative to a reference.

Formulas as in the papers and in the TRL trainers of the same names. c and r are the chosen and rejected response's sum
of log-probs minus that of the reference (means over tokens if `averages`). Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from automodel_cli.objectives.base import Metric
from automodel_cli.objectives.preference_settings import REFERENCE_FREE, SMOOTHED, SORTED, Loss, PreferenceSettings

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput
    from automodel_cli.objectives.preference_losses import Pairs


@dataclass(frozen=True)
class DPO(PreferenceSettings):
    """Loss = mean over pairs of `preference_weight` x preference loss + `nll_weight` x NLL of the chosen response.

    Example: loss=sigmoid (arXiv:2305.18290) is -log sigmoid(beta (c - r)). If policy and reference are equal, c = r = 0
    and the loss is log 2 = 0.693.

    - `label_smoothing`: fraction of pairs assumed to be labeled the wrong way round (sigmoid, sigmoid_norm, simpo,
      robust, exo_pair, aot, aot_unpaired).
    - `average_log_probs`: None uses the definition of the loss (ipo, simpo, orpo and sigmoid_norm average).
    - `extra_losses`: added to `preference_weight` x `loss` (MPO, arXiv:2411.10442: sigmoid 0.8, bco_pair 0.2, and an
      `nll_weight`).
    - `ld_alpha`: weight of tokens beyond the length of the pair's shorter response, 0 to 1 (LD-DPO, arXiv:2409.06411).
    - `f_divergence` (f-DPO, arXiv:2309.16240): c and r become f'(t) of the probability ratio t: log t for reverse_kl, 1
      - 1/t for forward_kl, log(2t / (t + 1)) for js, (t^(a - 1) - 1) / (a - 1) for alpha with a = `f_alpha`.
    - `aot`, `aot_unpaired` (arXiv:2406.05882) compare distributions: the pairs of the step on all ranks are sorted by
      the policy's log-ratio of chosen to rejected (unpaired: chosen responses by c, rejected ones by r). Each is
      compared with the reference's log-ratio (unpaired: the r) of equal rank.

    Metrics are means over pairs of all ranks: `accuracy` (chosen above rejected; a tie is a miss), `rewards_chosen`,
    `rewards_rejected` and `rewards_margin`: c, r and c - r, NOT multiplied by beta; `likelier` (the chosen response has
    the larger sum of log-probs, without reference).
    """

    @property
    def uses_reference(self) -> bool:
        """Whether batches must contain `ref_logprobs_BT`."""
        return self.loss not in REFERENCE_FREE

    @property
    def columns(self) -> frozenset[str]:
        """See `PreferenceObjective`."""
        columns = {"pairs_P2", "ref_logprobs_BT"} if self.uses_reference else {"pairs_P2"}
        columns |= {"partners_P2"} if self.loss in SORTED else set()
        return frozenset(columns | ({"sharpened_logprobs_BT"} if self.use_wpo_weighting else set()))

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        pair_metrics = {
            "preference_loss": Metric("num_pairs"),
            "accuracy": Metric("num_pairs", shown=True),
            "rewards_chosen": Metric("num_pairs"),
            "rewards_rejected": Metric("num_pairs"),
            "rewards_margin": Metric("num_pairs", shown=True),
            "likelier": Metric("num_pairs"),
        }
        if self.use_wpo_weighting:
            pair_metrics["wpo_weight"] = Metric("num_pairs")
        if self.nll_weight:
            pair_metrics["sft_loss"] = Metric("num_pairs")
        return {**pair_metrics, "num_pairs": Metric()}

    def weight(self, batch: Batch) -> Tensor:
        """Number of pairs whose responses both have label tokens."""
        from automodel_cli.objectives.preference_losses import valid_pairs

        return valid_pairs(batch).sum()

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        pairs = self._pairs(output.logprobs_BT, batch)
        # A pair without labels (truncated away) has weight 0 in the sum, and `weight` does not count it.
        weight_P = pairs.valid_P * self._weights(output.logprobs_BT, batch) if self.use_wpo_weighting else pairs.valid_P
        loss = self.preference_weight * (self._losses(pairs) * weight_P).sum()
        for name, weight in self.extra_losses.items():
            loss = loss + weight * (self._of(name).losses_of(output.logprobs_BT, batch) * weight_P).sum()
        if self.nll_weight:
            loss = loss + self.nll_weight * (self._nll(pairs) * pairs.valid_P).sum()
        return loss

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        pairs = self._pairs(output.logprobs_BT, batch)
        values = {
            "preference_loss": self._losses(pairs),
            "accuracy": (pairs.c_P > pairs.r_P).float(),
            "rewards_chosen": pairs.c_P,
            "rewards_rejected": pairs.r_P,
            "rewards_margin": pairs.c_P - pairs.r_P,
            "likelier": (pairs.chosen_logprob_P > pairs.rejected_logprob_P).float(),
        }
        if self.use_wpo_weighting:
            values["wpo_weight"] = self._weights(output.logprobs_BT, batch)
        if self.nll_weight:
            values["sft_loss"] = self._nll(pairs)
        sums = {name: (value_P * pairs.valid_P).sum() for name, value_P in values.items()}
        return {**sums, "num_pairs": pairs.valid_P.sum()}

    def _pairs(self, logprobs_BT: Tensor, batch: Batch) -> Pairs:
        from automodel_cli.objectives.preference_losses import diverged, gather_pairs

        pairs = gather_pairs(
            logprobs_BT, batch, reference=self.uses_reference, average=self.averages, tail_weight=self.ld_alpha
        )
        # Sums of log-probs (B, T) -> (documents) -> (P, 2) -> c and r (P). All losses are functions of these two
        # vectors.
        return diverged(pairs, self.f_divergence, self.f_alpha)

    def _of(self, name: Loss) -> DPO:
        """Return the same settings with another loss."""
        smoothing = self.label_smoothing if name in SMOOTHED else 0.0
        return replace(
            self, loss=name, extra_losses={}, label_smoothing=smoothing, gamma=None, tau=None,
            nll_weight=self.nll_weight or 1.0,
        )  # fmt: skip

    def losses_of(self, logprobs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the preference loss of each pair, `[P]`."""
        return self._losses(self._pairs(logprobs_BT, batch))

    def compared(self, logprobs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the values that aot and aot_unpaired sort, `[P, 3]`: two values per pair, and whether it counts."""
        from automodel_cli.objectives.preference_losses import sorted_values

        return sorted_values(self._pairs(logprobs_BT, batch), paired=self.loss == "aot")

    def _weights(self, logprobs_BT: Tensor, batch: Batch) -> Tensor:
        from automodel_cli.objectives.preference_losses import likelihood_weights

        return likelihood_weights(logprobs_BT, batch)

    def _losses(self, pairs: Pairs) -> Tensor:
        from automodel_cli.objectives.preference_losses import LOSSES, LossOptions, matched_losses

        options = LossOptions(self.beta, self.label_smoothing, self.gamma, self.tau)
        if self.loss in SORTED:
            return matched_losses(pairs, options, paired=self.loss == "aot")
        return LOSSES[self.loss](pairs.c_P, pairs.r_P, options)

    def _nll(self, pairs: Pairs) -> Tensor:
        # `clamp`: pairs without labels divide by 1, and are masked by the caller.
        return -pairs.chosen_logprob_P / (pairs.chosen_tokens_P.clamp(min=1) if self.average_sft else 1)
