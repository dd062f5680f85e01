"""Config node of quantization-aware training. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_range
from automodel_cli.models.lora_config import LoRAConfig

_WEIGHTS = ("int4", "int8", "fp8", "mxfp4", "nvfp4")
_ACTIVATIONS = {"int4": ("int8", "fp8"), "int8": ("int8",), "fp8": ("fp8",)}
_FIXED = {"mxfp4": 32, "nvfp4": 16}
_GROUP = {"none": 32, "int8": 32, "fp8": 128}
"""Default group of int4. vLLM has a kernel for fp8 inputs with groups of 128 only."""


@dataclass(frozen=True)
class QATConfig:
    """Quantization-aware training (docs/methods/qat.md): train the weights that survive quantization.

    The forward pass rounds the weights of linear layers as the quantized export stores them. Gradients pass the
    rounding unchanged, and the optimizer updates the unquantized weights.

    - Quantized are the linear layers of decoder layers whose inputs are a multiple of `group_size`. LM head, embeddings
      and norms keep their precision. The log reports their number.
    - `activation_dtype` also rounds the inputs of these layers, with one scale per token.
    - The export is a compressed-tensors checkpoint, which transformers and vLLM load.
    """

    weight_dtype: Literal["int4", "int8", "fp8", "mxfp4", "nvfp4"] = "int4"
    """Format of the weights: `int4` or `int8` with symmetric scales, `fp8` (e4m3), `mxfp4` or `nvfp4`."""
    activation_dtype: Literal["none", "int8", "fp8"] = "none"
    """Format of the inputs of quantized layers: `int8` with int4 or int8 weights, `fp8` with int4 or fp8 weights."""
    group_size: int | None = None
    """Weights of a row that share a scale, for int4 and int8. null: 32 for int4 (128 with fp8 inputs, which
    vLLM requires), a row for int8. fp8 has one scale per row, mxfp4 one per 32 weights and nvfp4 one per 16."""
    fake_quant_after_n_steps: int = 0
    """Train this many steps without fake quantization first, so that the weights settle."""
    target_modules: list[str] = field(default_factory=list)
    """Name endings of the layers to quantize, for example `[mlp.down_proj]`. Each must match a layer. Empty: all."""
    exclude_modules: list[str] = field(default_factory=list)
    """Name endings of layers to exclude. Each must match a layer. vLLM joins q, k and v, and gate and up: exclude all
    layers of such a group or none."""
    export: Literal["compressed-tensors", "plain"] = "compressed-tensors"
    """Format of the export: `compressed-tensors` (quantized), or `plain` for the unquantized weights."""

    def __post_init__(self) -> None:
        check_choice("weight_dtype", self.weight_dtype, _WEIGHTS, fix="model.qat.weight_dtype=int4")
        check_choice(
            "activation_dtype", self.activation_dtype, ("none", "int8", "fp8"), fix="model.qat.activation_dtype=none"
        )
        check_choice("export", self.export, ("compressed-tensors", "plain"), fix="model.qat.export=compressed-tensors")
        check_range(
            "fake_quant_after_n_steps",
            self.fake_quant_after_n_steps,
            at_least=0,
            fix="model.qat.fake_quant_after_n_steps=0",
        )
        check_range("group_size", self.group_size, at_least=2, fix="model.qat.group_size=null")
        if self.activation_dtype != "none" and self.activation_dtype not in _ACTIVATIONS.get(self.weight_dtype, ()):
            raise ConfigError(
                f"activation_dtype={self.activation_dtype} is not supported with weight_dtype={self.weight_dtype}: no "
                "format of compressed-tensors with dynamic scales combines them",
                code="unsupported_combination",
                keys=("activation_dtype", "weight_dtype"),
                fix="model.qat.activation_dtype=none",
            )
        self._check_group()

    def _check_group(self) -> None:
        if self.group_size is None:
            return
        fixed = _FIXED.get(self.weight_dtype)
        if self.weight_dtype == "int4" or (self.weight_dtype == "int8" and self.activation_dtype == "none"):
            return
        if fixed == self.group_size:
            return
        rule = f"one scale per {fixed} weights" if fixed else "one scale per row"
        inputs = " and int8 inputs" if self.weight_dtype == "int8" else ""
        raise ConfigError(
            f"group_size={self.group_size} is not supported with weight_dtype={self.weight_dtype}{inputs}, which has "
            f"{rule}",
            code="unsupported_combination",
            keys=("group_size", "weight_dtype"),
            fix="model.qat.group_size=null",
        )

    @property
    def weights_per_scale(self) -> int | None:
        """Weights that share a scale, or None for a row."""
        default = _GROUP[self.activation_dtype] if self.weight_dtype == "int4" else _FIXED.get(self.weight_dtype)
        return self.group_size or default


def check_qat_model(model: Any) -> None:
    """Raise ConfigError for settings of a `ModelConfig` that fake quantization does not support."""
    if model.qat is None:
        return
    reasons = {
        "fp8": "both round the weights of linear layers",
        "transformer_engine": "its linear layers compute with weights of their own",
        "mtp": "exports of quantized checkpoints have no multi-token-prediction layers",
    }
    for name, reason in reasons.items():
        if getattr(model, name) is not None:
            raise ConfigError(
                f"qat is not supported with {name}, because {reason}",
                code="unsupported_combination",
                keys=("qat", name),
                fix=f"model.{name}=null, or model.qat=null",
            )
    if model.lora is not None:
        _check_lora(model.lora)


def _check_lora(lora: LoRAConfig) -> None:
    """Raise ConfigError for adapters that are no part of one quantized weight."""
    reasons = {
        "dropout": (0.0, "dropout acts on the inputs of the adapter, but its weight is a part of the quantized weight"),
        "use_dora": (False, "DoRA's norms are those of the unquantized rows"),
        "quantization": ("none", "the base would be rounded twice"),
        "target_parameters": (None, "adapters on experts are multiplied without their weights"),
    }
    for name, (usual, reason) in reasons.items():
        value = getattr(lora, name)
        if value != usual:
            default = "null" if usual is None else str(usual).lower()
            raise ConfigError(
                f"lora.{name}={value} is not supported with qat, because {reason}",
                code="unsupported_combination",
                keys=(f"lora.{name}", "qat"),
                fix=f"model.lora.{name}={default}",
            )
