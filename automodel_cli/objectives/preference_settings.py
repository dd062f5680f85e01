"""Settings of `DPO` and their validation, without arithmetic (`objectives/preference_losses.py`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NoReturn, get_args

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range, reject_fields

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
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "simpo", *SORTED)


@dataclass(frozen=True)
class PreferenceSettings:
    """The fields of `DPO` and the rules between them. `DPO` documents their meaning."""

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
        if smoothing and self.loss not in SMOOTHED:
            raise ConfigError(
                f"label_smoothing={smoothing} has no effect with loss={self.loss}. loss must be one of: "
                f"{', '.join(SMOOTHED)}",
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
    def averages(self) -> bool:
        """Whether c and r are means over tokens."""
        return self.loss in _AVERAGED if self.average_log_probs is None else self.average_log_probs
