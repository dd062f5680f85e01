"""Preference pairs (DPO and variants): raise the likelihood of chosen over rejected responses, relative to a reference.

Formulas as in the papers and in the TRL trainers of the same names. c and r are the chosen and rejected response's sum
of log-probs minus that of the reference (means over tokens if `averages`). Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range, reject_fields
from automodel_cli.objectives.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput
    from automodel_cli.objectives.preference_losses import Pairs

Loss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "aot",
    "aot_unpaired",
    "simpo",
    "orpo",
]
REFERENCE_FREE = ("simpo", "orpo")
SORTED = ("aot", "aot_unpaired")
"""Losses that match the pairs of a step by rank. The compared values are measured before the update."""
_AVERAGED = ("sigmoid_norm", "ipo", "simpo", "orpo")
_OF_DIFFERENCES = ("sigmoid", "hinge", "robust", "exo_pair", "discopop")
"""Losses that depend on c - r only, which other divergences support."""
Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
_SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "simpo", *SORTED)


@dataclass(frozen=True)
class DPO:
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

    loss: Loss = "sigmoid"
    """Preference loss by name. Formulas: docs/methods/preferences.md."""
    beta: float = 0.1
    """Temperature of the loss (for orpo the weight of the odds ratio)."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with a wrong label."""
    average_log_probs: bool | None = None
    """Average a response's log-probs over its tokens instead of summing them. null: as the loss defines it."""
    preference_weight: float = 1.0
    """Weight of the preference loss."""
    nll_weight: float = 0.0
    """Weight of the NLL of the chosen response."""
    average_sft: bool = False
    """Average the NLL over tokens instead of summing it."""
    gamma: float | None = None
    """Target margin of simpo."""
    tau: float | None = None
    """Temperature of discopop's blend."""
    extra_losses: dict[Loss, float] = field(default_factory=dict)
    """Additional losses by name, each with its weight (MPO, arXiv:2411.10442)."""
    ld_alpha: float | None = None
    """Weight, 0 to 1, of tokens beyond the shorter response's length (LD-DPO, arXiv:2409.06411)."""
    f_divergence: Divergence = "reverse_kl"
    """Divergence that keeps the policy near the reference (f-DPO, arXiv:2309.16240)."""
    f_alpha: float | None = None
    """Order of `f_divergence=alpha`."""
    use_wpo_weighting: bool = False
    """Weight each pair's losses (not the NLL) by its likelihood under the policy: e to the mean over tokens of log p
    - log sum p^2 (WPO, arXiv:2406.11827), without gradient. Costs one more forward pass per step."""

    def __post_init__(self) -> None:
        check_range("beta", self.beta, at_least=0, fix="objective.beta=0.1")
        if self.beta == 0 and self.loss in ("ipo", "sppo_hard", "discopop", "orpo"):
            raise ConfigError(
                f"beta=0 is not supported with loss={self.loss}, because the loss would be constant or undefined",
                code="unsupported_combination",
                keys=("beta", "loss"),
                fix="objective.beta=0.1",
            )
        self._check_smoothing()
        for name, loss in (("gamma", "simpo"), ("tau", "discopop")):
            if getattr(self, name) is not None and self.loss != loss:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect with loss={self.loss}. Only loss={loss} uses it",
                    code="no_effect",
                    keys=(name, "loss"),
                    fix=f"objective.loss={loss}, or remove objective.{name}",
                )
        check_range("tau", self.tau, above=0, fix="objective.tau=0.05")
        self._check_extra_losses()
        self._check_sorted()
        self._check_divergence()
        self._check_weights()

    def _check_weights(self) -> None:
        for name in ("preference_weight", "nll_weight"):
            check_range(name, getattr(self, name), at_least=0, fix=f"objective.{name}=1.0")
        if not self.preference_weight + self.nll_weight > 0:
            raise ConfigError(
                "preference_weight and nll_weight are both 0, so nothing is trained",
                code="nothing_to_train",
                keys=("preference_weight", "nll_weight"),
                fix="objective.preference_weight=1.0",
            )
        if self.loss == "orpo" and self.nll_weight == 0:
            raise ConfigError(
                "loss=orpo requires nll_weight above 0, because it is an SFT loss with an odds-ratio penalty",
                code="requires_setting",
                keys=("nll_weight", "loss"),
                fix="objective.nll_weight=1.0 objective.average_sft=true",
            )
        if self.average_log_probs is False and self.loss in ("sigmoid_norm", "simpo", "orpo"):
            raise ConfigError(
                f"average_log_probs=false is not supported with loss={self.loss}, which uses means over tokens",
                code="unsupported_combination",
                keys=("average_log_probs", "loss"),
                fix="remove objective.average_log_probs",
            )
        if self.average_sft and self.nll_weight == 0:
            raise ConfigError(
                "average_sft=true has no effect with nll_weight=0",
                code="no_effect",
                keys=("average_sft", "nll_weight"),
                fix="objective.nll_weight=0.1",
            )

    def _reject(self, code: str, reason: str, *names: str, fix: str) -> NoReturn:
        reject_fields(self, code, reason, *names, fix=fix)

    def _check_extra_losses(self) -> None:
        plain = "objective.extra_losses={}"
        for name, weight in self.extra_losses.items():
            if (
                name not in get_args(Loss)
                or name == self.loss
                or name in ("robust", "exo_pair", "discopop", "simpo", *SORTED)
            ):
                self._reject(
                    "invalid_choice",
                    f"contains {name}, which cannot be added to another loss",
                    "extra_losses",
                    "loss",
                    fix=plain,
                )
            if (name in REFERENCE_FREE) != (self.loss in REFERENCE_FREE):
                reason = "is not supported because only one of the two uses a reference model"
                self._reject("unsupported_combination", reason, "extra_losses", "loss", fix=plain)
            if not weight > 0:
                self._reject("out_of_range", "must have weights above 0", "extra_losses", fix=plain)
        if self.extra_losses and self.average_log_probs is not None:
            reason = "is not supported because each loss averages by its own definition"
            self._reject("unsupported_combination", reason, "extra_losses", "average_log_probs", fix=plain)

    def _check_sorted(self) -> None:
        if self.loss not in SORTED:
            return
        code, reason = "unsupported_combination", "is not supported because the loss sorts sums of log-probs"
        if self.averages:
            self._reject(code, reason, "average_log_probs", "loss", fix="remove objective.average_log_probs")
        reason = "is not supported because the loss compares responses of different pairs"
        if self.ld_alpha is not None:
            self._reject(code, reason, "ld_alpha", "loss", fix="objective.ld_alpha=null")
        if self.use_wpo_weighting:
            self._reject(code, reason, "use_wpo_weighting", "loss", fix="objective.use_wpo_weighting=false")

    def _check_divergence(self) -> None:
        check_range("ld_alpha", self.ld_alpha, at_least=0, at_most=1, fix="objective.ld_alpha=0.5")
        if self.f_divergence != "reverse_kl":
            losses = (self.loss, *self.extra_losses)
            if self.averages or any(name not in _OF_DIFFERENCES for name in losses):
                reason = (
                    f"is not supported. loss must be one of: {', '.join(_OF_DIFFERENCES)}, on sums of log-probs "
                    "(average_log_probs=false)"
                )
                self._reject(
                    "unsupported_combination", reason, "f_divergence", "loss", fix="objective.f_divergence=reverse_kl"
                )
        if (self.f_divergence == "alpha") != (self.f_alpha is not None) or self.f_alpha == 1:
            fix = "objective.f_divergence=alpha objective.f_alpha=0.5"
            reason = "is not valid: f_divergence=alpha requires f_alpha, and f_alpha=1 is f_divergence=reverse_kl"
            self._reject("requires_setting", reason, "f_divergence", "f_alpha", fix=fix)

    def _check_smoothing(self) -> None:
        smoothing = self.label_smoothing
        check_range("label_smoothing", smoothing, at_least=0, below=0.5, fix="objective.label_smoothing=0.1")
        if smoothing and self.loss not in _SMOOTHED:
            raise ConfigError(
                f"label_smoothing={smoothing} has no effect with loss={self.loss}. loss must be one of: "
                f"{', '.join(_SMOOTHED)}",
                code="no_effect",
                keys=("label_smoothing", "loss"),
                fix="objective.label_smoothing=0.0",
            )
        if not smoothing and self.loss == "exo_pair":
            raise ConfigError(
                "loss=exo_pair requires label_smoothing above 0, because the loss contains its logarithm",
                code="requires_setting",
                keys=("label_smoothing", "loss"),
                fix="objective.label_smoothing=0.001",
            )

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
    def averages(self) -> bool:
        """Whether c and r are means over tokens."""
        return self.loss in _AVERAGED if self.average_log_probs is None else self.average_log_probs

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
        smoothing = self.label_smoothing if name in _SMOOTHED else 0.0
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
