"""Settings of `GRPO` and their validation, without arithmetic (`objectives/policy_gradient.py`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from automodel_cli.config.value_checks import check_range, reject_fields
from automodel_cli.objectives.kl import KLType


@dataclass(frozen=True)
class PolicySettings:
    """The fields of `GRPO` and the rules between them. `GRPO` documents their meaning."""

    policy_loss: Literal["clip", "cispo", "reinforce", "sapo"] = "clip"
    """Policy loss: `clip` (PPO), `cispo`, `reinforce` or `sapo` (a soft gate). Formulas: docs/methods/grpo.md."""
    importance_sampling_level: Literal["token", "sequence", "sequence_token", "on_policy"] = "token"
    """Importance ratio of a `token`, of the `sequence` (GSPO), `sequence_token` (GSPO-token), or `on_policy` (1,
    for one update per rollout)."""
    clip_low: float = 0.2
    """The ratio is clamped from below at 1 - `clip_low`."""
    clip_high: float = 0.2
    """The ratio is clamped from above at 1 + `clip_high`."""
    dual_clip_ratio: float | None = None
    """Bounds the loss of negative advantages by -A x `dual_clip_ratio`; above 1. null: no bound."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """Divide by the label tokens of the step (`token`), average per response first (`sequence`), or divide by
    responses x `normalization_length`."""
    normalization_length: int | None = None
    """The constant divisor per response of `loss_aggregation=constant` (Dr. GRPO)."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference."""
    kl_type: KLType = "k3"
    """Estimator of the KL, with d = reference - policy log-prob: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Add the KL to the `loss`, or subtract it from the `reward`."""
    kl_bias_correction: bool = False
    """Weight the KL by policy / sampler probability."""
    kl_score_term: bool = True
    """Give the KL the gradient of its expectation, with the score-function term. false: of its value alone."""
    kl_input_clamp: float | None = 20.0
    """Clamp of d in the KL, at plus and minus this. null: no clamp."""
    kl_output_clamp: float | None = 10.0
    """Clamp of the KL of a token, at plus and minus this. null: no clamp."""
    sampler_correction: Literal["none", "importance", "truncate", "icepop", "sequence_mask"] = "none"
    """Correction weight of a token for the difference between sampler and trainer: `none`, `importance`, `truncate`
    (TIS), `icepop` (MIS) or `sequence_mask`."""
    sampler_correction_level: Literal["token", "sequence"] | None = None
    """Correction weight per `token`, or its product over the response (`sequence`). null: as
    `importance_sampling_level`."""
    sampler_correction_clip_max: float | None = None
    """Upper bound of the correction weight. `truncate` clamps to it; `icepop` and `sequence_mask` drop larger
    weights."""
    sampler_correction_clip_min: float | None = None
    """Lower bound of the correction weight. `truncate` clamps to it; `icepop` and `sequence_mask` drop smaller
    weights."""
    positive_nll_coef: float = 0.0
    """Weight of the NLL of responses with a reward above 0."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    top_entropy_fraction: float | None = None
    """Fraction of an update's tokens with a policy loss: those of highest entropy before the first update
    (arXiv:2506.01939). null: all."""
    sapo_positive: float = 1.0
    """Slope of sapo's gate for positive advantages."""
    sapo_negative: float = 1.05
    """Slope of sapo's gate for negative advantages."""

    def __post_init__(self) -> None:
        self._check_clipping()
        self._check_surrogate()
        self._check_aggregation()
        self._check_kl()
        self._check_correction()
        check_range("positive_nll_coef", self.positive_nll_coef, at_least=0, fix="objective.positive_nll_coef=0.0")
        check_range("entropy_coef", self.entropy_coef, at_least=0, fix="objective.entropy_coef=0.001")
        fraction = self.top_entropy_fraction
        check_range("top_entropy_fraction", fraction, above=0, below=1, fix="objective.top_entropy_fraction=0.2")

    def _reject(self, code: str, reason: str, *names: str, fix: str) -> NoReturn:
        reject_fields(self, code, reason, *names, fix=fix)

    def _check_clipping(self) -> None:
        check_range("clip_low", self.clip_low, at_least=0, at_most=1, fix="objective.clip_low=0.2")
        check_range("clip_high", self.clip_high, at_least=0, fix="objective.clip_high=0.2")
        check_range("dual_clip_ratio", self.dual_clip_ratio, above=1, fix="objective.dual_clip_ratio=3.0")
        if self.dual_clip_ratio is not None:
            if self.policy_loss != "clip":
                self._reject(
                    "no_effect",
                    "has no effect, because dual clip applies to policy_loss=clip only",
                    "dual_clip_ratio",
                    "policy_loss",
                    fix="objective.dual_clip_ratio=null",
                )
            if self.importance_sampling_level == "on_policy":
                self._reject(
                    "no_effect",
                    "has no effect, because the importance ratio is always 1",
                    "dual_clip_ratio",
                    "importance_sampling_level",
                    fix="objective.dual_clip_ratio=null",
                )
        clips = self.policy_loss in ("clip", "cispo") and self.importance_sampling_level != "on_policy"
        for name, default in (("clip_low", 0.2), ("clip_high", 0.2)):
            if getattr(self, name) != default and not clips:
                self._reject(
                    "no_effect",
                    "has no effect, because this loss has no importance ratio to clamp",
                    name,
                    "policy_loss",
                    "importance_sampling_level",
                    fix=f"objective.{name}={default}",
                )

    def _check_surrogate(self) -> None:
        for name, default in (("sapo_positive", 1.0), ("sapo_negative", 1.05)):
            check_range(name, getattr(self, name), above=0, fix=f"objective.{name}={default}")
            if getattr(self, name) != default and self.policy_loss != "sapo":
                self._reject(
                    "no_effect",
                    "has no effect, because only policy_loss=sapo has a gate",
                    name,
                    "policy_loss",
                    fix=f"objective.{name}={default}",
                )
        if self.policy_loss != "clip" and self.by_sequence:
            self._reject(
                "unsupported_combination",
                "is not supported because sequence ratios need policy_loss=clip",
                "policy_loss",
                "importance_sampling_level",
                fix="objective.importance_sampling_level=token",
            )
        if self.policy_loss == "cispo" and self.importance_sampling_level == "on_policy":
            self._reject(
                "unsupported_combination",
                "is not supported because the token ratio of cispo would always be 1",
                "policy_loss",
                "importance_sampling_level",
                fix="objective.importance_sampling_level=token",
            )

    def _check_aggregation(self) -> None:
        if self.by_sequence and self.loss_aggregation != "sequence":
            self._reject(
                "requires_setting",
                "is not supported because sequence ratios require loss_aggregation=sequence",
                "importance_sampling_level",
                "loss_aggregation",
                fix="objective.loss_aggregation=sequence",
            )
        if self.policy_loss == "cispo" and self.loss_aggregation == "sequence":
            self._reject(
                "unsupported_combination",
                "is not supported because cispo is a sum over tokens",
                "policy_loss",
                "loss_aggregation",
                fix="objective.loss_aggregation=token",
            )
        if (self.loss_aggregation == "constant") != (self.normalization_length is not None):
            self._reject(
                "requires_setting",
                "is not valid: loss_aggregation=constant and normalization_length require each other",
                "loss_aggregation",
                "normalization_length",
                fix="objective.loss_aggregation=constant objective.normalization_length=1024",
            )
        length = self.normalization_length
        check_range("normalization_length", length, at_least=1, fix="objective.normalization_length=1024")

    def _check_kl(self) -> None:
        check_range("kl_coef", self.kl_coef, at_least=0, fix="objective.kl_coef=0.01")
        for name in ("kl_input_clamp", "kl_output_clamp"):
            note = ", or null for no clamp"
            check_range(name, getattr(self, name), above=0, note=note, fix=f"objective.{name}=null")
        kl_defaults = {
            "kl_type": "k3",
            "kl_placement": "loss",
            "kl_input_clamp": 20.0,
            "kl_output_clamp": 10.0,
            "kl_score_term": True,
        }
        unused = [name for name, default in kl_defaults.items() if getattr(self, name) != default]
        if self.kl_coef == 0 and unused:
            reset = " ".join(f"objective.{name}={str(kl_defaults[name]).lower()}" for name in unused)
            self._reject(
                "no_effect",
                "has no effect, because the loss has no KL term",
                *unused,
                "kl_coef",
                fix=f"objective.kl_coef=0.01, or {reset}",
            )
        if not self.kl_score_term and (self.kl_placement == "reward" or self.kl_bias_correction):
            other = "kl_placement" if self.kl_placement == "reward" else "kl_bias_correction"
            reason = "the loss has no KL" if other == "kl_placement" else "the weight brings a gradient of its own"
            self._reject("no_effect", reason, "kl_score_term", other, fix="objective.kl_score_term=true")
        if self.kl_bias_correction and (self.kl_coef == 0 or self.kl_placement == "reward"):
            self._reject(
                "no_effect",
                "has no effect, because the loss has no KL term",
                "kl_bias_correction",
                "kl_coef",
                "kl_placement",
                fix="objective.kl_bias_correction=false",
            )

    def _check_correction(self) -> None:
        low, high = self.sampler_correction_clip_min, self.sampler_correction_clip_max
        bounded = self.sampler_correction in ("truncate", "icepop", "sequence_mask")
        if self.sampler_correction_level is not None and self.sampler_correction in ("none", "sequence_mask"):
            self._reject(
                "no_effect",
                "has no effect, because only importance, truncate and icepop have a level",
                "sampler_correction_level",
                "sampler_correction",
                fix="objective.sampler_correction_level=null",
            )
        if not bounded and (low is not None or high is not None):
            self._reject(
                "no_effect",
                "has no effect, because this correction has no bounds",
                "sampler_correction",
                "sampler_correction_clip_min",
                "sampler_correction_clip_max",
                fix="objective.sampler_correction=truncate",
            )
        if not bounded:
            return
        if high is None or not high > 0:
            self._reject(
                "requires_setting",
                "requires an upper bound above 0",
                "sampler_correction",
                "sampler_correction_clip_max",
                fix="objective.sampler_correction_clip_max=2.0",
            )
        if low is None and self.sampler_correction != "truncate":
            self._reject(
                "requires_setting",
                "requires a lower bound",
                "sampler_correction",
                "sampler_correction_clip_min",
                fix="objective.sampler_correction_clip_min=0.5",
            )
        if low is not None and high is not None and low > high:
            self._reject(
                "out_of_range",
                "is not valid because the lower bound is above the upper bound",
                "sampler_correction_clip_min",
                "sampler_correction_clip_max",
                fix=f"objective.sampler_correction_clip_min={high}",
            )
        if self.sampler_correction == "sequence_mask" and self.by_sequence:
            self._reject(
                "unsupported_combination",
                "is not supported because sequence_mask uses token ratios",
                "sampler_correction",
                "importance_sampling_level",
                fix="objective.sampler_correction=truncate",
            )

    @property
    def by_sequence(self) -> bool:
        """Whether a response has one ratio."""
        return self.importance_sampling_level in ("sequence", "sequence_token")

    @property
    def corrects_by_sequence(self) -> bool:
        """Whether the correction has one weight for a response."""
        return (
            self.by_sequence if self.sampler_correction_level is None else self.sampler_correction_level == "sequence"
        )

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss: 0 if the KL is subtracted from rewards."""
        return self.kl_coef if self.kl_placement == "loss" else 0.0

    @property
    def uses_old_logprobs(self) -> bool:
        """Whether batches must contain `old_logprobs_BT` if a rollout has several updates."""
        return self.importance_sampling_level != "on_policy"
