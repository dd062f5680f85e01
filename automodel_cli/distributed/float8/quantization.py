"""float8 GEMMs: casts with one scale per row or per tensor, and the product of two casts.

A number x is stored as q = round(s x) in float8 and read as q / s. With the maximum m of the values that share a scale,
s = 448 / m for e4m3 and 57344 / m for e5m2. If the recipe has power-of-two scales, s is rounded down to a power of two,
so that multiplication by s is exact.

Example: a row with maximum 3 in e4m3 has s = 149.3, or 128 as a power of two. 0.7 becomes 89.6, which is stored as 88
and read as 0.6875.

GEMMs accumulate in float32. Recipes and numbers are those of torchao's float8 training (BSD-3-Clause;
`torchao.float8.config`). Tests compare with torchao, which is not needed to run. MXFP8, with one scale per 32 values,
is in `mxfp8`.

Every GEMM is A [M, K] times B [N, K] transposed. Both operands are cast along K, and are contiguous in K as tensor
cores need.

Shapes: T tokens, F features. M, N, K as above. Leading dimensions (experts) are batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.float8 import mxfp8
from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion, RegionCompiler, fused

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""K and N of a GEMM on a GPU must be multiples of this. If K counts tokens, it is padded with zeros."""
CAPABILITY = (8, 9)
_SMALLEST = 1e-12  # Smallest maximum. Rows of zeros need a scale too.
_EXPONENT = -0x800000  # Mask of the sign and exponent bits of a float32.


@dataclass(frozen=True)
class Float8Recipe:
    """Float8 recipe, with the names of torchao.

    Attributes:
        by_row: one scale per row of an operand, instead of one per tensor.
        gradient: dtype of output gradients. All other operands are e4m3.
        power_of_two: round scales down to powers of two.
        exact_weight_gradient: compute the weight gradient in the original precision. The input-gradient GEMM then has
            one scale per weight.
        blocks: one scale per 32 values of a row (MXFP8).
    """

    name: str
    by_row: bool
    gradient: torch.dtype
    power_of_two: bool
    exact_weight_gradient: bool = False
    blocks: bool = False

    @property
    def multiple(self) -> int:
        """K and N must be multiples of this."""
        return mxfp8.BLOCK if self.blocks else MULTIPLE

    @property
    def capability(self) -> tuple[int, int]:
        """Minimum compute capability."""
        return mxfp8.CAPABILITY if self.blocks else CAPABILITY


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Float8Recipe("rowwise", by_row=True, gradient=E4M3, power_of_two=True),
        Float8Recipe("tensorwise", by_row=False, gradient=E5M2, power_of_two=False),
        Float8Recipe("rowwise_with_gw_hp", by_row=True, gradient=E4M3, power_of_two=True, exact_weight_gradient=True),
        Float8Recipe("mxfp8", by_row=True, gradient=E4M3, power_of_two=True, blocks=True),
    )
}


class Operand(NamedTuple):
    """Operand of a float8 GEMM.

    Attributes:
        values_MK: float8, contiguous.
        inverse: 1 / scale of each row (float32 `[M, 1]`), of the tensor (`[]`), or of each block (`mxfp8`).
    """

    values_MK: Tensor
    inverse: Tensor


@dataclass
class Arithmetic:
    """How a module computes GEMMs.

    `cast`, `cast_to`, `largest` and `cast_blocks` are functions, or their compiled versions.

    Attributes:
        emulate: compute with the values of the casts in float32, on any device.
    """

    recipe: Float8Recipe
    emulate: bool

    def __post_init__(self) -> None:
        self.paused = False
        """Compute as torch's layers do."""
        self.cast: Callable[..., tuple[Tensor, Tensor]] = _cast
        self.cast_to: Callable[..., tuple[Tensor, Tensor]] = _cast_to
        self.largest: Callable[..., Tensor] = _largest
        self.cast_blocks: Callable[..., tuple[Tensor, Tensor]] = mxfp8.cast_mxfp8

    def fuse(self, fuser: RegionCompiler) -> None:
        """Compile each cast into one kernel with `fuser`."""
        if self.recipe.blocks:
            self.cast_blocks = fused(mxfp8.FUSED_OPS, fuser)
            return
        cast, cast_to, largest = _regions(self.recipe)
        self.cast, self.cast_to, self.largest = fused(cast, fuser), fused(cast_to, fuser), fused(largest, fuser)

    def operand(
        self,
        x_TF: Tensor,
        dtype: torch.dtype = E4M3,
        *,
        transposed: bool = False,
        by_row: bool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Operand:
        """Cast `x_TF` for a GEMM that contracts F, or T if `transposed`.

        Args:
            dtype: float8 dtype.
            by_row: overrides the recipe.
            group: ranks over which the dimension of a scale is sharded. The call is collective then.
        """
        by_row = self.recipe.by_row if by_row is None else by_row
        multiple = self.recipe.multiple
        if transposed and x_TF.shape[-2] % multiple:
            x_TF = torch.nn.functional.pad(x_TF, (0, 0, 0, -x_TF.shape[-2] % multiple))
        x_TF = x_TF.detach().contiguous()  # Contiguous, so that all casts share one graph.
        if self.recipe.blocks:  # Blocks are never split between ranks.
            return Operand(*self.cast_blocks(x_TF, transposed, not self.emulate))
        if group is None:
            return Operand(*self.cast(x_TF, dtype, self.recipe.power_of_two, by_row, transposed))
        largest = self.largest(x_TF, by_row, transposed)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return Operand(*self.cast_to(x_TF, largest, dtype, self.recipe.power_of_two, transposed))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Multiply two operands, `[M, N]` in `dtype`.

        Args:
            fast: allow Hopper's tensor cores to accumulate in less than float32, as torchao does in forward.
        """
        if self.emulate:
            wide = torch.promote_types(dtype, torch.float32)
            with _no_autocast(a.values_MK.device):
                return (dequantize_operand(a, wide) @ dequantize_operand(b, wide).t()).to(dtype)
        if self.recipe.blocks:
            return mxfp8.mxfp8_gemm(a.values_MK, a.inverse, b.values_MK, b.inverse).to(dtype)
        inverse_a, inverse_b = a.inverse, b.inverse
        kind = ScalingType.RowWise if inverse_a.ndim or inverse_b.ndim else ScalingType.TensorWise
        # One operand may have one scale per tensor. torch needs the same kind for both.
        if kind is ScalingType.RowWise:
            inverse_a = inverse_a.expand(len(a.values_MK), 1).contiguous()
            inverse_b = inverse_b.expand(len(b.values_MK), 1).contiguous().t()
        result_MN = scaled_mm(
            a.values_MK,
            b.values_MK.t(),
            inverse_a,
            kind,
            inverse_b,
            kind,
            output_dtype=torch.bfloat16,  # The only dtype that every kernel supports.
            use_fast_accum=fast,
        )
        return result_MN.to(dtype)


def require_float8(device: torch.device, recipe: Float8Recipe) -> None:
    """Raise ConfigError if float8 GEMMs do not run on `device`."""
    where, fix = "model.fp8", "model.fp8=null, or model.fp8.emulate=true for the same numbers without the speed"
    kinds = "L40S, H100, B200"
    if recipe.blocks:
        where, kinds = "model.fp8.recipe=mxfp8", "B200"
        fix = "model.fp8.recipe=rowwise, or model.fp8.emulate=true for the same numbers without the speed"
    if device.type != "cuda":
        reason = f"this run is on {device.type}"
    elif torch.version.hip is not None:
        reason = f"{torch.cuda.get_device_name()} is an AMD GPU, whose formats differ"
    elif torch.cuda.get_device_capability() < recipe.capability:
        has = ".".join(map(str, torch.cuda.get_device_capability()))
        reason = f"{torch.cuda.get_device_name()} has {has}"
    else:
        return
    needed = ".".join(map(str, recipe.capability))
    raise ConfigError(
        f"{where} needs an NVIDIA GPU of compute capability {needed} or higher ({kinds}), but {reason}",
        code="hardware_required",
        keys=("model.fp8",),
        fix=fix,
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on this device, or None outside autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return the values that an operand represents."""
    if operand.inverse.dtype == mxfp8.SCALE:
        return mxfp8.dequantize_mxfp8(operand.values_MK, operand.inverse, dtype)
    return operand.values_MK.to(dtype) * operand.inverse


def scale_of(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Return the scale of values with the given maximum, float32."""
    # In float64, because compiled code divides with an error above 1 ulp in float32.
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=_SMALLEST)).float()
    if power_of_two:  # Keep the exponent bits. Logarithms would round numbers next to a power of two up to it.
        # 149.3 = 2^7 * 1.167 becomes 128: without its mantissa bits, a float is the power of two below it.
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return scale


def _cast(
    x_TF: Tensor, dtype: torch.dtype, power_of_two: bool, by_row: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    return _cast_to(x_TF, _largest(x_TF, by_row, transposed), dtype, power_of_two, transposed)


def _largest(x_TF: Tensor, by_row: bool, transposed: bool) -> Tensor:
    """Return the maximum of each row `[M, 1]`, or of the tensor `[]`."""
    if not by_row:
        return x_TF.abs().amax()
    return x_TF.abs().amax(-2).unsqueeze(-1) if transposed else x_TF.abs().amax(-1, keepdim=True)


def _cast_to(
    x_TF: Tensor, largest: Tensor, dtype: torch.dtype, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    limit, scale = torch.finfo(dtype).max, scale_of(largest, dtype, power_of_two)
    x_MK = x_TF.transpose(-2, -1) if transposed else x_TF
    # `clamp`: a conversion to e4m3 turns values above 448 into nan.
    values_MK = (x_MK.float() * scale).clamp(-limit, limit).to(dtype).contiguous()
    return values_MK, scale.reciprocal()


def _regions(
    recipe: Float8Recipe,
) -> tuple[FusibleRegion[tuple[Tensor, Tensor]], FusibleRegion[tuple[Tensor, Tensor]], FusibleRegion[Tensor]]:
    """Return the regions of `cast`, `cast_to` and `largest`. Their graphs contain constants of the recipe."""

    def numbers(rows: int) -> Tensor:
        return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))

    def to_cast(rows: int) -> tuple[object, ...]:
        return numbers(rows), E4M3, recipe.power_of_two, recipe.by_row, False

    def to_cast_to(rows: int) -> tuple[object, ...]:
        return numbers(rows), _largest(numbers(rows), recipe.by_row, False), E4M3, recipe.power_of_two, False

    def to_measure(rows: int) -> tuple[object, ...]:
        return numbers(rows), recipe.by_row, False

    return (
        FusibleRegion(f"fp8 cast {recipe.name}", _cast, None, to_cast),
        FusibleRegion(f"fp8 cast to a maximum {recipe.name}", _cast_to, None, to_cast_to),
        FusibleRegion(f"fp8 maximum {recipe.name}", _largest, None, to_measure),
    )
