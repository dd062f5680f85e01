"""Config node of low-rank adapters. Torch-free."""

from __future__ import annotations

import difflib
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range

_INITIAL = ("default", "gaussian", "orthogonal", "pissa", "olora")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters on linear layers (Hu et al. 2021), injected by `peft`. All other weights are frozen.

    The update is `scale * B @ A` with `scale = alpha / rank`, or `alpha / sqrt(rank)` with `use_rslora`. Example:
    `rank` 16 and `alpha` 32 give scale 2.

    `target_modules` is a regular expression over module names, a list of name endings, or "all-linear". Each entry of a
    list must match a layer. "all-linear" selects every linear layer (GPT-2's Conv1D counts) except:

    - the LM head and routers
    - output projections of state-space layers, which fused kernels read directly
    - layers that share their weight (Zamba's blocks)
    - linear layers of mixtures of experts whose names peft reads as the experts

    `quantization: nf4` is QLoRA: these layers store their weights in 4 bits with bitsandbytes, unsharded on every
    data-parallel rank.
    """

    rank: int = 16
    """Rank of the adapters (Hu et al. 2021)."""
    alpha: float = 32.0
    """Scale of the update: `alpha / rank` times B A."""
    dropout: float = 0.0
    """Dropout probability of adapter inputs in training."""
    target_modules: str | list[str] = "all-linear"
    """Layers with adapters: a regular expression over module names, a list of name endings, or `all-linear`. A list
    can name the embedding and the head too: `[q_proj, v_proj, embed_tokens, lm_head]`."""
    target_parameters: str | list[str] | None = None
    """Fused experts with adapters, which peft calls target parameters: `all-experts`, or a list of name endings such
    as `[experts.gate_up_proj, experts.down_proj]`. null: none. With them, `target_modules` may be `[]`."""
    use_rslora: bool = False
    """Scale the update by `alpha / sqrt(rank)` instead."""
    use_dora: bool = False
    """Train the norm of each output beside the adapters (DoRA, Liu et al. 2024)."""
    init_lora_weights: str = "default"
    """First values of the adapters. `default`: A is uniform and B is zero. `gaussian`: A is normal and B is zero.
    `orthogonal`, `pissa`, `pissa_niter_16` (PiSSA by a fast decomposition of 16 iterations) and `olora` are those of
    peft."""
    exclude_modules: list[str] = field(default_factory=list)
    """Layers without adapters, as name endings. Each must match a layer that `target_modules` selects."""
    layers_to_transform: list[int] = field(default_factory=list)
    """Decoder layers with adapters, counted from 0, and layers of an adapted vision tower. Empty: all. Requires
    `target_modules` as a list or `all-linear`."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Rank of some layers, by name ending or regular expression: `{down_proj: 32}`. Each must match an adapter. Names
    of experts are those of their weights (`mlp.experts.gate_up_proj`), which must have the same rank and alpha."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Alpha of some layers, by name ending or regular expression: `{down_proj: 64}`. Each must match an adapter."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained completely and stored with the adapters, as name endings: `[lm_head, embed_tokens]`."""
    trainable_token_indices: list[int] = field(default_factory=list)
    """Token ids whose rows of the embedding and the head are trained beside the adapters. The new tokens of
    `model.tokenizer.add_tokens` are trained without being listed."""
    pretrained: str | None = None
    """Folder or hub id of an adapter of peft to continue. It sets rank, alpha and layers. null: new adapters."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4` stores the adapted layers' frozen weights in 4 bits with bitsandbytes (QLoRA)."""

    @property
    def starts_as_base(self) -> bool:
        """Whether the model without its adapters is the model that training started from."""
        return self.pretrained is None and not self.modules_to_save

    @property
    def starts_at_weights(self) -> bool:
        """Whether the first B A is a part of the weight, which the layer subtracts."""
        return self.init_lora_weights.startswith(("pissa", "olora"))

    def __post_init__(self) -> None:
        self._check_init()
        self._check_patterns()
        self._check_pretrained()
        check_range("rank", self.rank, at_least=1, fix="model.lora.rank=16")
        check_range("alpha", self.alpha, above=0, fix="model.lora.alpha=32")
        check_range("dropout", self.dropout, at_least=0, below=1, fix="model.lora.dropout=0")
        self._check_target_parameters()
        if not self.target_modules and self.target_parameters is None:
            raise ConfigError(
                "target_modules is empty, so no layer would be trained",
                code="empty_value",
                keys=("target_modules",),
                fix="model.lora.target_modules=all-linear",
            )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def _check_target_parameters(self) -> None:
        targets = self.target_parameters
        if targets is None:
            return
        if not targets or (isinstance(targets, str) and targets != "all-experts"):
            raise ConfigError(
                f"target_parameters={targets!r} must be all-experts or a list of name endings",
                code="empty_value" if not targets else "invalid_value",
                keys=("target_parameters",),
                fix="model.lora.target_parameters=all-experts",
            )
        for key, usual in (("dropout", 0), ("use_dora", False), ("init_lora_weights", "default")):
            if getattr(self, key) != usual:
                raise ConfigError(
                    f"{key}={getattr(self, key)} is not supported with target_parameters: peft has none on experts",
                    code="unsupported_combination",
                    keys=(key, "target_parameters"),
                    fix=f"model.lora.{key}={str(usual).lower()}",
                )

    def _check_init(self) -> None:
        method = self.init_lora_weights
        if method not in _INITIAL and not re.fullmatch(r"pissa_niter_[1-9]\d*", method):
            near = difflib.get_close_matches(method, _INITIAL, 1, 0.5) or ["default"]
            raise ConfigError(
                f"init_lora_weights={method} must be one of {', '.join(_INITIAL)}, or pissa_niter_N",
                code="invalid_value",
                keys=("init_lora_weights",),
                fix=f"model.lora.init_lora_weights={near[0]}",
            )
        if self.use_dora and self.starts_at_weights:
            raise ConfigError(
                f"init_lora_weights={method} is not supported with use_dora, because peft cannot convert such adapters "
                "to adapters of the base",
                code="unsupported_combination",
                keys=("init_lora_weights", "use_dora"),
                fix="model.lora.init_lora_weights=default",
            )

    def _check_patterns(self) -> None:
        for name in ("rank", "alpha"):
            for pattern, value in getattr(self, f"{name}_pattern").items():
                key, lowest = f"{name}_pattern", {"at_least": 1} if name == "rank" else {"above": 0}
                check_range(f"{key}.{pattern}", value, **lowest, fix=f"model.lora.{key}={{}}")  # type: ignore[arg-type]
        for layer in self.layers_to_transform:
            check_range("layers_to_transform", layer, at_least=0, fix="model.lora.layers_to_transform=[]")
        for key in ("exclude_modules", "layers_to_transform") if self.target_parameters is not None else ():
            if getattr(self, key):
                raise ConfigError(
                    f"{key} is not supported with target_parameters, because peft does not apply it to experts",
                    code="unsupported_combination",
                    keys=(key, "target_parameters"),
                    fix=f"model.lora.{key}=[]",
                )
        by_regex = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
        for key in ("exclude_modules", "layers_to_transform"):
            if by_regex and getattr(self, key):
                raise ConfigError(
                    f"{key} is not supported with target_modules={self.target_modules!r}, a regular expression, which "
                    "can exclude layers itself",
                    code="unsupported_combination",
                    keys=(key, "target_modules"),
                    fix=f"model.lora.{key}=[]",
                )

    def _check_pretrained(self) -> None:
        """The adapter on disk determines its structure."""
        if self.pretrained is None:
            return
        names = (
            "rank",
            "alpha",
            "target_modules",
            "use_rslora",
            "use_dora",
            "init_lora_weights",
            "exclude_modules",
            "layers_to_transform",
            "rank_pattern",
            "alpha_pattern",
            "modules_to_save",
            "target_parameters",
            "trainable_token_indices",
        )
        usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        for name in names:
            if getattr(self, name) != usual[name]:
                raise ConfigError(
                    f"{name} is not supported with pretrained={self.pretrained}, whose adapter_config.json sets it",
                    code="mutually_exclusive",
                    keys=(name, "pretrained"),
                    fix="model.lora.pretrained=null",
                )
