"""FLOPs and ideal time of one operator call: the roofline of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from automodel_cli.dryrun import gpus
from automodel_cli.dryrun.gpus import Gpu
from automodel_cli.dryrun.torch_compat import unset_fake_temporarily

_aten = torch.ops.aten

FREE = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.detach.default,
        _aten._local_scalar_dense.default,
        _aten.lift_fresh.default,
        _aten.set_.source_Storage,
        _aten.is_same_size.default,
    }
)
"""Calls that launch nothing."""
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten._scaled_mm_v2.default)
_GATHERS = ("aten::index", "aten::index_select", "aten::gather", "aten::embedding")


def is_view(func: Any) -> bool:
    return func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::alias", "aten::_reshape_alias")


def is_to_itself(func: Any, args: Sequence[Any]) -> bool:
    """A copy that torch leaves out."""
    return func is _aten.copy_.default and args[0] is args[1]


def flops(func: Any, args: Sequence[Any], real: Callable[[Tensor], Tensor | None]) -> float:
    """Of a matrix product or of attention, 0 for everything else. `real` gives the integers of a tensor."""
    if func in _PRODUCTS:
        a, b = args[1:3] if func is _aten.addmm.default else args[:2]
        return 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    if func in (_aten.bmm.default, _aten.baddbmm.default):
        a, b = args[:2] if func is _aten.bmm.default else args[1:3]
        return 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
    if func is _aten._grouped_mm.default:
        a, b = args[:2]
        if a.dim() == 2:  # rows of many experts, or sums over the rows of each
            return 2.0 * a.shape[0] * a.shape[1] * b.shape[-1]
        return 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[-1]
    if func._schema.name.startswith("aten::_flash_attention"):
        return _attention(func._schema.name.endswith("backward"), args, real)
    return 0.0


def _attention(backward: bool, args: Sequence[Any], real: Callable[[Tensor], Tensor | None]) -> float:
    """Causal, aligned at the end of each segment: query i of a segment meets keys 1..(keys - queries + i)."""
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    bounds = [real(bound) if bound is not None else None for bound in ((args[6], args[7]) if backward else args[3:5])]
    with unset_fake_temporarily():
        if bounds[0] is None or bounds[1] is None:
            pairs = query.shape[0] * key.shape[0] / 2
        else:
            queries, keys = (bound.diff().double() for bound in bounds if bound is not None)
            pairs = float((queries * (keys - queries / 2)).sum())
    return 4.0 * pairs * query.shape[1] * query.shape[2] * (2.5 if backward else 1.0)


def num_bytes(func: Any, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> int:
    """Read and written: every tensor once; of a table that is looked up, only what is taken."""
    if func._schema.name in _GATHERS:
        return 2 * sum(t.numel() * t.element_size() for t in outs)
    unique = {id(t): t for t in (*tensors, *outs)}
    if func.namespace == "automodel":  # kernels of our own say what they overwrite: it is read and written
        written = func._schema.name.endswith("_")
        return sum(t.numel() * t.element_size() for t in unique.values()) + (_largest(tensors) if written else 0)
    return sum(t.numel() * t.element_size() for t in unique.values())


def _largest(tensors: Sequence[Tensor]) -> int:
    return max((t.numel() * t.element_size() for t in tensors), default=0)


def seconds(gpu: Gpu, func: Any, work: float, moved: int, dtype: torch.dtype) -> float:
    """The slower of arithmetic and memory, and never below a kernel's floor."""
    rate = gpu.peak_bf16 * gpus.GEMM
    if "flash" in func._schema.name or "grouped" in func._schema.name:
        rate = gpu.peak_bf16 * gpus.ATTENTION
    if dtype.itemsize == 1:
        rate *= 2
    if dtype == torch.float32:
        rate = gpu.peak_fp32 * gpus.FP32_PRODUCTS
    return max(work / rate, memory_seconds(gpu, moved))


def flex_seconds(gpu: Gpu, work: float, moved: int, dtype: torch.dtype) -> float:
    """Of a kernel that torch compiles: FlexAttention, or without `work` anything between products."""
    rate = gpu.peak_fp32 * gpus.FP32_PRODUCTS if dtype == torch.float32 else gpu.peak_bf16 * gpus.FLEX
    return max(work / rate, memory_seconds(gpu, moved))


def memory_seconds(gpu: Gpu, moved: int) -> float:
    """Of a kernel without products."""
    return max(moved / (gpu.bandwidth * gpus.MEMORY), gpus.KERNEL_SECONDS)
