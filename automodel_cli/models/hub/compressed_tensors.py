"""Checkpoints in the compressed-tensors format: tensors of quantized weights, their config, and lazy reading.

| Weights | Inputs | Format | Tensors of a layer |
|---|---|---|---|
| int4 | any | pack-quantized | `weight_packed` int32 `[O, I / 8]`, `weight_scale`, `weight_shape` |
| int8 | none | pack-quantized | `weight_packed` int32 `[O, I / 4]`, `weight_scale`, `weight_shape` |
| int8 | int8 | int-quantized | `weight` int8, `weight_scale` |
| fp8 | none, fp8 | naive-quantized, float-quantized | `weight` float8_e4m3fn, `weight_scale` |
| mxfp4 | none | mxfp4-pack-quantized | `weight_packed` uint8 `[O, I / 2]`, `weight_scale` uint8 (exponents) |
| nvfp4 | none | nvfp4-pack-quantized | the same with `weight_scale` float8_e4m3fn, and `weight_global_scale` |

Scales are `[O, G]`, with G groups of a row. Integers of b bits are stored plus 2^(b-1), the first in the lowest bits.
4-bit floats are pairs in a byte, the first in the lower half. Example: the int4 codes -8, 7, 0, ... start with the
nibbles 0, 15, 8. Source: github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Required, TypedDict

import torch
from torch import Tensor

from automodel_cli.distributed.qat.formats import Format, Scales, codes, dequantized, weight_scales
from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.models.hub.lazy_tensor import LazyTensor, StoredTensor


class WeightScheme(TypedDict, total=False):
    """How the weights of a group are quantized."""

    num_bits: Required[int]
    type: Required[str]
    strategy: Required[str]
    group_size: int | None
    symmetric: bool


class Group(TypedDict, total=False):
    """Layers that are quantized in the same way."""

    format: str
    weights: Required[WeightScheme]


class Quantization(TypedDict, total=False):
    """`quantization_config` of config.json, as far as it is read."""

    quant_method: str
    format: str
    weight_block_size: list[int]
    config_groups: dict[str, Group]


METHOD = "compressed-tensors"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_PACKED, _SCALE, _SHAPE, _FACTOR = "weight_packed", "weight_scale", "weight_shape", "weight_global_scale"
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)


def format_name(qat: FakeQuantization) -> str:
    """Return the format of the checkpoint that compressed-tensors has for these weights and inputs."""
    if qat.weights.name in ("mxfp4", "nvfp4"):
        return f"{qat.weights.name}-pack-quantized"
    if qat.weights.name == "fp8":
        return "naive-quantized" if qat.activations is None else "float-quantized"
    return "int-quantized" if qat.weights.name == "int8" and qat.activations is not None else "pack-quantized"


def quantization_config(qat: FakeQuantization) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    weights, scheme = qat.weights, format_name(qat)
    strategy = "channel" if weights.group_size is None else "tensor_group" if weights.name == "nvfp4" else "group"
    of_weights = {**_arguments(weights), "strategy": strategy, "group_size": weights.group_size, "dynamic": False}
    if weights.name in ("mxfp4", "nvfp4"):
        dtype = "torch.uint8" if weights.name == "mxfp4" else "torch.float8_e4m3fn"
        of_weights |= {"scale_dtype": dtype, "zp_dtype": dtype}
    of_inputs = None
    if qat.activations is not None:
        of_inputs = {**_arguments(qat.activations), "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_weights, "input_activations": of_inputs, "format": scheme}
    # transformers reads packed 4-bit floats in bfloat16, which it does not multiply with float32.
    dequantize = weights.name in ("mxfp4", "nvfp4") and qat.read_dtype == torch.float32
    return {
        "quant_method": METHOD,
        **({"dequantize": True} if dequantize else {}),
        "format": scheme,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": list(qat.ignored),
        "kv_cache_scheme": None,
    }


def _arguments(form: Format) -> dict[str, Any]:
    return {"num_bits": form.bits, "type": "int" if form.is_integer else "float", "symmetric": True}


def compressed(
    name: str, weight_OI: Tensor, qat: FakeQuantization, amax: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a quantized weight.

    Args:
        name: hub name, which ends in `weight`.
        weight_OI: full weight in the dtype in which it is quantized.
        amax: largest absolute value of the weights that share a factor in nvfp4.
        dtype: of the scales of integers and fp8.
    """
    form, prefix = qat.weights, name.removesuffix("weight")
    scales = weight_scales(weight_OI, form, amax)
    coded_OI = codes(weight_OI, form, scales)
    scheme = format_name(qat)
    if scheme == "pack-quantized":
        yield prefix + _PACKED, pack_integers(coded_OI, form.bits)
        yield prefix + _SHAPE, torch.tensor(weight_OI.shape)
    elif form.bits == 8:
        yield name, coded_OI.to(torch.int8 if form.is_integer else torch.float8_e4m3fn)
    else:
        yield prefix + _PACKED, pack_e2m1(coded_OI)
    if form.name == "mxfp4":
        exponents_OG = scales.of_groups.log2().round() + _E8M0_BIAS
        yield prefix + _SCALE, exponents_OG.to(torch.uint8)
    elif scales.of_tensor is not None:
        yield prefix + _SCALE, (scales.of_groups * scales.of_tensor).to(torch.float8_e4m3fn)
        yield prefix + _FACTOR, scales.of_tensor
    else:
        yield prefix + _SCALE, scales.of_groups.to(dtype)


def pack_integers(coded_OI: Tensor, bits: int) -> Tensor:
    """Pack codes of 4 or 8 bits into int32 `[O, ceil(I bits / 32)]`."""
    per_word = 32 // bits
    shifted = coded_OI.long() + (1 << (bits - 1))
    padded = torch.nn.functional.pad(shifted, (0, -shifted.shape[-1] % per_word)).view(len(shifted), -1, per_word)
    return (padded << (bits * torch.arange(per_word, device=coded_OI.device))).sum(-1).to(torch.int32)


def unpack_integers(packed_OW: Tensor, bits: int) -> Tensor:
    """Return the codes in fp32, with those of the padding."""
    shifts = bits * torch.arange(32 // bits, device=packed_OW.device)
    return (((packed_OW[..., None].long() >> shifts) & ((1 << bits) - 1)) - (1 << (bits - 1))).float().flatten(-2)


def pack_e2m1(coded_OI: Tensor) -> Tensor:
    """Pack pairs of 4-bit floats into bytes `[O, I / 2]`."""
    table = torch.tensor(_E2M1, device=coded_OI.device)
    nibbles = torch.searchsorted(table, coded_OI.abs()) | (torch.signbit(coded_OI).long() << 3)
    return (nibbles[..., ::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8)


def unpack_e2m1(packed_OB: Tensor) -> Tensor:
    """Return the codes in fp32."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed_OB.device)
    return torch.stack([table[(packed_OB & 0xF).int()], table[(packed_OB >> 4).int()]], -1).flatten(-2)


def why_unreadable(quantization: Quantization) -> str:
    """Return why a checkpoint cannot be dequantized, or an empty string."""
    found = {quantization.get("format"), *(group.get("format") for group in _groups(quantization))} - {None}
    if unknown := sorted(str(name) for name in found if name not in _FORMATS):
        return f"{METHOD} with the format {unknown[0]}"
    weights = [group.get("weights") or {} for group in _groups(quantization)]
    if len(weights) != 1 or not weights[0].get("symmetric", True):
        return f"{METHOD} with several groups or zero points"
    if weights[0].get("strategy") not in ("group", "channel", "tensor_group"):
        return f"{METHOD} with one scale per {weights[0].get('strategy')}"
    return "" if weights[0].get("num_bits") in (4, 8) else f"{METHOD} with {weights[0].get('num_bits')} bits"


def _groups(quantization: Quantization) -> list[Group]:
    return list(quantization.get("config_groups", {}).values())


def plain(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, StoredTensor]:
    """Return the lazy tensors by hub key. Each quantized weight and its scales become one plain lazy tensor."""
    of_weights = _groups(quantization)[0]["weights"]
    result: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        prefix, _, leaf = key.rpartition(".")
        if leaf in (_SCALE, _SHAPE, _FACTOR) or key.endswith("zero_point"):
            continue
        scale = tensors.get(f"{prefix}.{_SCALE}")
        if scale is not None and leaf in (_PACKED, "weight"):
            result[f"{prefix}.weight"] = _Weight(tensor, scale, tensors.get(f"{prefix}.{_FACTOR}"), of_weights)
        else:
            result[key] = tensor
    return result


class _Weight(LazyTensor):
    """The weight as transformers reads it. A part is read with all columns of its rows."""

    def __init__(self, stored: StoredTensor, scale: StoredTensor, factor: StoredTensor | None, weights: WeightScheme):
        self._stored, self._scale, self._factor = stored, scale, factor
        self._bits, self._is_integer = weights["num_bits"], weights["type"] == "int"
        self._group = weights.get("group_size") if weights["strategy"] != "channel" else None
        rows, columns = stored.get_shape()
        packed = {"I32": 32 // self._bits, "U8": 2}.get(str(stored.get_dtype()), 1)
        width = columns * packed if self._group is None else scale.get_shape()[1] * self._group
        self.shape = [rows, width]
        self.dtype_name = str(scale.get_dtype()) if str(scale.get_dtype()) in ("F32", "F16", "BF16") else "BF16"

    def _read(self, ranges: list[tuple[int, int]]) -> Tensor:
        (r0, r1), (c0, c1) = ranges
        stored, scale = self._stored[r0:r1], self._scale[r0:r1]
        dtype = {"F32": torch.float32, "F16": torch.float16}.get(self.dtype_name, torch.bfloat16)
        if stored.dtype == torch.int32:
            coded = unpack_integers(stored, self._bits)[:, : self.shape[1]]
        else:
            coded = unpack_e2m1(stored) if stored.dtype == torch.uint8 else stored.float()
        name = f"int{self._bits}" if self._is_integer else "fp8"
        if scale.dtype == torch.uint8:
            name, scale = "mxfp4", (scale.float() - _E8M0_BIAS).exp2()
        elif self._factor is not None:
            name, scale = "nvfp4", scale.float() / self._factor[:].float()
        return dequantized(coded, Format(name, self._group), Scales(scale.float()), dtype)[:, c0:c1]
