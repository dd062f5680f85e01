"""Arithmetic of `GRPO`: importance ratios, correction weights, KL, and their sums over the label tokens of a batch.

Metrics are means over label tokens, unless stated otherwise:

| metric | meaning |
|---|---|
| `token_mult_prob_error` | e^abs(sampler - old), 1 if sampler and trainer agree |
| `logprob_gap_max` | largest abs(sampler - old) |
| `gen_kl_error`, `policy_kl_error`, `js_divergence_error` | k3 in both directions, and Jensen-Shannon divergence |
| `sampling_importance_ratio` | weight of the sampler correction (sequence level: mean over responses) |
| `entropy`, `approx_entropy` | exact entropy, and its estimate from the sampled tokens |
| `probs_ratio`, `probs_ratio_clamped` | importance ratio, also with `_min` and `_max` |
| `clip_fraction` | tokens whose ratio is clamped |
| `clip_low_fraction`, `clip_high_fraction` | clamped below with A < 0, above with A > 0: no gradient |
| `clip_dual_fraction` | tokens bounded by dual clip |
| `kl_penalty` | KL in loss or reward without coefficient, aggregated like the loss |
| `is_oob_ratio` | tokens outside the correction bounds (sequence_mask: responses) |
| `top_entropy_fraction` | tokens trained under `top_entropy_fraction` |
| `positive_nll_loss` | NLL of responses with a reward above 0, mean over their label tokens (`num_positive_tokens`) |
| `num_valid_samples` | responses with a label token |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.base import Metric
from automodel_cli.objectives.kl import kl_penalty
from automodel_cli.objectives.policy_settings import PolicySettings
from automodel_cli.objectives.segment_reduce import label_mask, labels_by_document, sum_by_document, to_tokens

_TOKENS, _SEQUENCES, _POSITIVE = "num_response_tokens", "num_valid_samples", "num_positive_tokens"
POSITIVE_SCALE = "positive_scale_1"
"""Column with the scale of the NLL of positive responses (`objectives/denominators.py`)."""


def num_sequences(batch: Batch) -> Tensor:
    """Return the number of documents with a label token, an int64 scalar."""
    return (labels_by_document(batch) > 0).sum()


def num_positive_tokens(batch: Batch) -> Tensor:
    """Return the number of label tokens of responses with a reward above 0, an int64 scalar."""
    return (label_mask(batch) & (batch.extra["rewards_BT"] > 0)).sum()


def policy_metrics(objective: PolicySettings) -> Mapping[str, Metric]:
    """Return the names that `PolicyTerms.metrics` returns with these settings."""
    by_tokens = (
        "token_mult_prob_error",
        "gen_kl_error",
        "policy_kl_error",
        "js_divergence_error",
        "entropy",
        "approx_entropy",
        "probs_ratio",
        "probs_ratio_clamped",
        "clip_fraction",
        "clip_low_fraction",
        "clip_high_fraction",
    )
    shown = ("entropy", "token_mult_prob_error", "clip_fraction")
    values = {name: Metric(_TOKENS, shown=name in shown) for name in by_tokens}
    for name in ("probs_ratio", "probs_ratio_clamped"):
        values |= {f"{name}_min": Metric(combine="min"), f"{name}_max": Metric(combine="max")}
    values["logprob_gap_max"] = Metric(combine="max")
    values["sampling_importance_ratio"] = Metric(_SEQUENCES if objective.corrects_by_sequence else _TOKENS)
    if objective.dual_clip_ratio is not None:
        values["clip_dual_fraction"] = Metric(_TOKENS)
    if objective.kl_coef:
        values["kl_penalty"] = Metric(_TOKENS if objective.loss_aggregation == "token" else _SEQUENCES, shown=True)
    if objective.sampler_correction_clip_max is not None:
        values["is_oob_ratio"] = Metric(_SEQUENCES if objective.sampler_correction == "sequence_mask" else _TOKENS)
    if objective.top_entropy_fraction is not None:
        values["top_entropy_fraction"] = Metric(_TOKENS)
    if objective.positive_nll_coef:
        values |= {"positive_nll_loss": Metric(_POSITIVE), _POSITIVE: Metric()}
    return {**values, _TOKENS: Metric(), _SEQUENCES: Metric()}


@dataclass(frozen=True)
class PolicyTerms:
    """One microbatch under one objective. Columns are 0 for ignored labels."""

    objective: PolicySettings
    batch: Batch
    mask_BT: Tensor
    now_BT: Tensor
    entropy_BT: Tensor
    old_BT: Tensor
    sampler_BT: Tensor
    advantages_BT: Tensor

    @classmethod
    def of(cls, objective: PolicySettings, output: HeadOutput, batch: Batch) -> PolicyTerms:
        """Read the columns of `batch.extra`. A KeyError names a column that the recipe did not fill.

        Without `old_logprobs_BT`, the rollout has one update, and its log-probs are the old ones.
        """
        mask_BT = label_mask(batch)

        def column(name: str) -> Tensor:
            return batch.extra[name].masked_fill(~mask_BT, 0.0)

        now_BT = output.logprobs_BT.masked_fill(~mask_BT, 0.0)
        # Detached: the ratio is exactly 1 in value, and its gradient is that of log p.
        given = objective.uses_old_logprobs and "old_logprobs_BT" in batch.extra
        old_BT = column("old_logprobs_BT") if given else now_BT.detach()
        assert output.entropy_BT is not None, "GRPO needs entropies"
        entropy_BT = output.entropy_BT.masked_fill(~mask_BT, 0.0)
        return cls(
            objective,
            batch,
            mask_BT,
            now_BT,
            entropy_BT,
            old_BT,
            column("sampler_logprobs_BT"),
            column("advantages_BT"),
        )

    def loss(self) -> Tensor:
        """Return the SUM that `GRPO.weight` divides."""
        objective = self.objective
        losses_BT = self._policy_losses()
        if objective.sampler_correction != "none":
            losses_BT = losses_BT * self._correction[0]
        if objective.top_entropy_fraction is not None:
            losses_BT = losses_BT * self.batch.extra["uncertain_BT"]
        if objective.loss_kl_coef:
            losses_BT = losses_BT + objective.loss_kl_coef * self._kl()
        if objective.entropy_coef:
            losses_BT = losses_BT - objective.entropy_coef * self.entropy_BT
        total = self.aggregate(losses_BT)
        if objective.positive_nll_coef:
            total = total + objective.positive_nll_coef * self._sum(self._positive_nll()) * self._positive_scale()
        return total

    def metrics(self) -> dict[str, Tensor]:
        """Return sums and extrema. See the module docstring."""
        objective, mask_BT = self.objective, self.mask_BT
        gap_BT = self.old_BT - self.sampler_BT
        q_BT, clamped_BT = self._ratio, self._clamped()
        # log((p + q) / 2), from log-probs.
        mixture_BT = torch.logaddexp(self.old_BT, self.sampler_BT) - torch.log(torch.tensor(2.0))
        by_token = {
            "token_mult_prob_error": gap_BT.abs().exp(),
            "gen_kl_error": _k3(gap_BT),
            "policy_kl_error": _k3(-gap_BT),
            "js_divergence_error": (_k3(self.old_BT - mixture_BT) + _k3(self.sampler_BT - mixture_BT)) / 2,
            "entropy": self.entropy_BT,
            "approx_entropy": -(self.now_BT - self.sampler_BT).exp() * self.now_BT,
            "probs_ratio": q_BT,
            "probs_ratio_clamped": clamped_BT,
            "clip_fraction": (q_BT != clamped_BT).float(),
            "clip_low_fraction": ((q_BT < clamped_BT) & (self.advantages_BT < 0)).float(),
            "clip_high_fraction": ((q_BT > clamped_BT) & (self.advantages_BT > 0)).float(),
        }
        values = {name: self._sum(value_BT) for name, value_BT in by_token.items()}
        for name, value_BT in (("probs_ratio", q_BT), ("probs_ratio_clamped", clamped_BT)):
            values[f"{name}_min"] = value_BT.masked_fill(~mask_BT, float("inf")).min()
            values[f"{name}_max"] = value_BT.masked_fill(~mask_BT, float("-inf")).max()
        values["logprob_gap_max"] = gap_BT.abs().max()
        weight_BT, outside = self._correction
        by_sequence = objective.corrects_by_sequence
        values["sampling_importance_ratio"] = self._by_sequence(weight_BT) if by_sequence else self._sum(weight_BT)
        if objective.dual_clip_ratio is not None:
            bounded_BT = (q_BT > objective.dual_clip_ratio) & (self.advantages_BT < 0)
            values["clip_dual_fraction"] = self._sum(bounded_BT.float())
        if objective.kl_coef:
            values["kl_penalty"] = self.aggregate(self._kl())
        if outside is not None:
            values["is_oob_ratio"] = outside
        if objective.top_entropy_fraction is not None:
            values["top_entropy_fraction"] = self._sum(self.batch.extra["uncertain_BT"])
        if objective.positive_nll_coef:
            values["positive_nll_loss"] = self._sum(self._positive_nll())
            values[_POSITIVE] = num_positive_tokens(self.batch).float()
        return {**values, _TOKENS: mask_BT.sum().float(), _SEQUENCES: num_sequences(self.batch).float()}

    @cached_property
    def _ratio(self) -> Tensor:
        """The importance ratio q at every token."""
        # Log of the ratio per token. Example: log-probs -1.0 now and -1.2 before give q = exp(0.2) = 1.22.
        change_BT = self.now_BT - self.old_BT
        if not self.objective.by_sequence:
            return change_BT.exp()
        mean_BT = self._mean_by_sequence(change_BT)  # [B, T], equal at all tokens of a response
        if self.objective.importance_sampling_level == "sequence_token":
            # The value is that of the response, the gradient that of the token.
            mean_BT = mean_BT.detach() + (self.now_BT - self.now_BT.detach())
        return mean_BT.exp()

    # Example of sequence levels: two tokens with log-ratios 0.3 and -0.1. `token`: q = 1.35 and 0.90. `sequence`: the
    # mean 0.1 gives q = 1.105 at both. The mean and not the sum, so that long responses are not clamped more often.
    def _clamped(self) -> Tensor:
        return self._ratio.clamp(1 - self.objective.clip_low, 1 + self.objective.clip_high)

    def _policy_losses(self) -> Tensor:
        objective, a_BT = self.objective, self.advantages_BT
        if objective.policy_loss == "reinforce":
            return -a_BT * self.now_BT
        # q is detached, so also clamped tokens have a gradient, with the weight clamp(q).
        if objective.policy_loss == "cispo":
            return -a_BT * self._clamped().detach() * self.now_BT
        if objective.policy_loss == "sapo":
            # The slope at q = 1 is t * 1/4 * 4 / t = 1, as without a gate.
            t_BT = torch.where(a_BT > 0, objective.sapo_positive, objective.sapo_negative)
            return -a_BT * (t_BT * (self._ratio - 1)).sigmoid() * 4 / t_BT
        # PPO's pessimistic bound: no gradient for A > 0 and q > 1 + clip_high, or for A < 0 and q < 1 - clip_low.
        losses_BT = torch.maximum(-a_BT * self._ratio, -a_BT * self._clamped())
        if objective.dual_clip_ratio is None:
            return losses_BT
        # Example: A = -1 and q = 10. The pessimistic bound is 10, without limit. With dual_clip_ratio 3 it is 3,
        # without gradient.
        return torch.where(a_BT < 0, torch.minimum(losses_BT, -a_BT * objective.dual_clip_ratio), losses_BT)

    @cached_property
    def _correction(self) -> tuple[Tensor, Tensor | None]:
        """The weight at every token (0 if not finite), and the sum of values outside the bounds."""
        objective = self.objective
        # Two programs computed the same policy: the trainer's forward, and the engine with other kernels and dtypes.
        gap_BT = self.old_BT - self.sampler_BT
        by_sequence = objective.corrects_by_sequence
        # Per response: the product of the token ratios, as a sum of logs.
        log_BT = to_tokens(sum_by_document(gap_BT, self.batch), self.batch) if by_sequence else gap_BT
        weight_BT = log_BT.exp()
        low, high = objective.sampler_correction_clip_min or 0.0, objective.sampler_correction_clip_max
        if high is None:
            return _finite(weight_BT), None
        if objective.sampler_correction == "sequence_mask":
            # Geometric mean of the token ratios, so that the bounds do not depend on the length.
            mean_BT = self._mean_by_sequence(gap_BT).exp()
            out_BT = ~((mean_BT >= low) & (mean_BT <= high))
            return _finite(weight_BT.masked_fill(out_BT, 0.0)), self._by_sequence(out_BT.float())
        out_BT = ~((weight_BT >= low) & (weight_BT <= high))
        outside = self._sum(out_BT.float())
        if objective.sampler_correction == "icepop":
            return _finite(weight_BT.masked_fill(out_BT, 0.0)), outside
        # A product of many ratios may overflow to inf, which is clamped. Tokens of probability 0 get weight 0.
        return torch.where(log_BT.isfinite(), weight_BT.clamp(low, high), 0.0).detach(), outside

    def _kl(self) -> Tensor:
        objective = self.objective
        ref_BT = self.batch.extra["ref_logprobs_BT"].masked_fill(~self.mask_BT, 0.0)
        return kl_penalty(
            self.now_BT,
            ref_BT,
            objective.kl_type,
            input_clamp=objective.kl_input_clamp,
            output_clamp=objective.kl_output_clamp,
            importance=(self.now_BT - self.sampler_BT).exp() if objective.kl_bias_correction else None,
            score_term=objective.kl_score_term,
        )

    def _positive_scale(self) -> Tensor:
        """Return the factor from a sum over positive tokens to their mean, times the denominator of the loss."""
        return self.batch.extra[POSITIVE_SCALE].squeeze(0)

    def _positive_nll(self) -> Tensor:
        return -self.now_BT * (self.batch.extra["rewards_BT"] > 0)

    def _sum(self, values_BT: Tensor) -> Tensor:
        return values_BT.masked_fill(~self.mask_BT, 0.0).sum()

    def aggregate(self, values_BT: Tensor) -> Tensor:
        """Return the sum that `GRPO.weight` divides."""
        # Example: responses of 2 and 4 tokens with losses 1 and 0.5 per token. `token`: (2 + 2) / 6 = 0.667.
        # `sequence`: (1 + 0.5) / 2 = 0.75, so a token of the short response has twice the weight.
        if self.objective.loss_aggregation == "sequence":
            return self._by_sequence(values_BT)
        total = self._sum(values_BT)
        return total if self.objective.normalization_length is None else total / self.objective.normalization_length

    def _by_sequence(self, values_BT: Tensor) -> Tensor:
        """Return the sum over responses of the mean over their label tokens."""
        sums_S = sum_by_document(values_BT.masked_fill(~self.mask_BT, 0.0), self.batch)
        return (sums_S / labels_by_document(self.batch).clamp(min=1)).sum()

    def _mean_by_sequence(self, values_BT: Tensor) -> Tensor:
        """Return the mean over a response's label tokens, at each of its tokens."""
        means_S = sum_by_document(values_BT, self.batch) / labels_by_document(self.batch).clamp(min=1)
        return to_tokens(means_S, self.batch)


def _k3(x: Tensor) -> Tensor:
    return x.exp() - 1 - x


def _finite(weight_BT: Tensor) -> Tensor:
    """Detach, and replace non-finite weights by 0. One impossible token must not stop the run."""
    return torch.where(weight_BT.isfinite(), weight_BT, 0.0).detach()
