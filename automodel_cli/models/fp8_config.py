"""Sections of the model that change how linear layers compute: float8 and Transformer Engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class TransformerEngineConfig:
    """Layers of NVIDIA's Transformer Engine (extra `te`) instead of torch's. CUDA only, not run on a GPU yet."""

    attention: bool = True
    """Compute packed attention with Transformer Engine, in bfloat16 or float16."""
    linear: bool = True
    """Replace the linear layers of the decoder layers."""
    norm: bool = True
    """Replace the RMS norms with fused ones."""
    fp8_recipe: Literal["none", "current", "block", "mxfp8"] = "none"
    """Scales of fp8 GEMMs: `current` has one per tensor, `block` one per 128 values, `mxfp8` one per 32 (Blackwell)."""

    def __post_init__(self) -> None:
        check_choice(
            "fp8_recipe",
            self.fp8_recipe,
            ("none", "current", "block", "mxfp8"),
            fix="model.transformer_engine.fp8_recipe=current",
        )
        if self.fp8_recipe != "none" and not self.linear:
            raise ConfigError(
                f"fp8_recipe={self.fp8_recipe} has no effect with linear=false, because it applies to linear layers",
                code="no_effect",
                keys=("fp8_recipe", "linear"),
                fix="model.transformer_engine.linear=true",
            )
        if not (self.attention or self.linear or self.norm):
            raise ConfigError(
                "attention, linear and norm are all false, so Transformer Engine has no effect",
                code="no_effect",
                keys=("attention", "linear", "norm"),
                fix="model.transformer_engine=null",
            )


@dataclass(frozen=True)
class Fp8Config:
    """Linear layers and experts in float8, with casts and scales at every use. Not run on a GPU yet.

    - `rowwise`: one scale (a power of two) per token and per output. `tensorwise`: one scale per tensor, faster and
      less exact. `rowwise_with_gw_hp`: rowwise, with weight gradients in the precision of the run. `mxfp8`: one scale
      (a power of two) per 32 values along the summed dimension (linear layers only).
    - Parameters, optimizer, checkpoints and exports are not changed. LM head, embeddings, routers, norms, and layers
      whose sizes are not multiples of 16 (mxfp8: 32) keep their precision. The log reports their number.
    - Needs an NVIDIA GPU of compute capability 8.9 (L40S, H100, B200), for experts 9 or 10 (H100, B200), for mxfp8 10.
    """

    recipe: Literal["rowwise", "tensorwise", "rowwise_with_gw_hp", "mxfp8"] = "rowwise"
    """Scales of the GEMMs: `rowwise`, `tensorwise` (faster, less exact), `rowwise_with_gw_hp` (weight gradients
    unquantized) or `mxfp8` (B200)."""
    exclude_modules: list[str] = field(default_factory=list)
    """Name endings of linear layers to exclude, for example `[o_proj, mlp.down_proj]`. Each must match a layer."""
    experts: bool = False
    """Compute experts in float8 too, if the recipe has a scale per row. It helps only with wide experts."""
    emulate: bool = False
    """Cast in the same way but multiply in float32, slower. Use it to check the numbers on a CPU or an older GPU."""

    def __post_init__(self) -> None:
        check_choice(
            "recipe",
            self.recipe,
            ("rowwise", "tensorwise", "rowwise_with_gw_hp", "mxfp8"),
            fix="model.fp8.recipe=rowwise",
        )
