"""FLOPs and bytes of one operator call as a `Kernel`, from the shapes of its tensors, on fake or meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.distributed.torch_compat import OpOverload
from automodel_cli.planning.kernel import Kernel

_aten = torch.ops.aten

Ends = Callable[[Tensor], "list[int] | None"]


def unknown(tensor: Tensor) -> None:
    """No integers are known."""


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
_VIEWS = frozenset({"aten::_unsafe_view", "aten::alias", "aten::_reshape_alias"})
_GATHERS = frozenset({"index", "index_select", "gather", "embedding", "_embedding_bag_forward_only"})
"""Of their table only what is taken is read."""
_SCATTERS = frozenset({"index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"})
"""Of what they write into only the places that the last tensor goes to are touched."""
_SHAPED_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "rand_like", "new_zeros", "new_ones", "new_full"})
"""Their argument is not read."""
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"})
"""Operators in place that do not read what they write."""
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm_v2", "add_grouped"}
)
_SDPA = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
_ENDS = 8  # where `_scaled_grouped_mm_v2` has the ends of its groups


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator as a dispatch mode receives it."""

    func: OpOverload
    args: tuple[Any, ...]  # Tensors, lists of them, numbers: by the schema of the operator.
    kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Without the namespace."""
        return self.func._schema.name.split("::")[1]

    @property
    def label(self) -> str:
        """With the namespace, except that of torch's own operators."""
        return self.func._schema.name.removeprefix("aten::")

    def __call__(self) -> object:
        return self.func(*self.args, **self.kwargs)


def launches(call: OperatorCall) -> bool:
    """Return whether a call starts a kernel. One without results and changes makes a note (streams, since torch 2.15),
    and torch skips a copy of a tensor to itself."""
    func, args = call.func, call.args
    return (
        func not in FREE
        and bool(func._schema.returns or func._schema.is_mutable)
        and not (func.is_view or func._schema.name in _VIEWS)
        and not (func is _aten.copy_.default and args[0] is args[1])
    )


def flops(call: OperatorCall, ends: Ends) -> float:
    """Of a matrix product or of attention, in whatever form, 0 for everything else. `ends` gives the integers of a
    tensor."""
    name, args = call.name, call.args
    if name.rstrip("_") in _PRODUCTS:
        a, b = args[1:3] if "add" in name else args[:2]
        if a.dim() == 2:  # grouped: rows of many experts, or sums over the rows of each
            return cast("float", 2.0 * a.shape[0] * a.shape[1] * b.shape[-1])
        return cast("float", 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[-1])
    if name.startswith("_flash_attention"):
        pairs, _ = _pairs(call, ends)
        query = args[1] if name.endswith("backward") else args[0]
        # Two GEMMs of 2 FLOPs per pair and width. Backward has five GEMMs, which is 2.5 times two.
        result: float = 4.0 * pairs * query.shape[1] * query.shape[2] * (2.5 if name.endswith("backward") else 1.0)
        return result
    if name.startswith(_SDPA):
        return _sdpa_flops(call)
    return 0.0


def _sdpa_flops(call: OperatorCall) -> float:
    """Of all pairs of a row, or the lower half of them where that is all that a kernel knows of its mask."""
    name, args = call.name, call.args
    backward = name.endswith("backward")
    query, key, value = args[1:4] if backward else args[:3]
    position = 11 if backward else 6 if "efficient" in name else 4
    is_causal = len(args) > position and args[position] is True
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * (0.5 if is_causal else 1.0)
    result: float = 2.0 * pairs * (query.shape[3] + value.shape[3]) * (2.5 if backward else 1.0)
    return result


def _pairs(call: OperatorCall, ends: Ends) -> tuple[float, float]:
    """Of queries and keys that meet, and keys that the segment of a query has on average. Causal is aligned at the end
    of each segment: query i of a segment meets keys 1..(keys - queries + i). Without it, as where a ring brings keys
    that all come before, every query of a segment meets all of its keys."""
    args, backward = call.args, call.name.endswith("backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    bounds = [ends(bound) if bound is not None else None for bound in ((args[6], args[7]) if backward else args[3:5])]
    # A segment of q queries and k keys has q * k pairs, less q^2 / 2 above the diagonal if it is causal: q = k = 4
    # gives 8.
    behind = 0.5 if args[11 if backward else 8] else 0.0
    if bounds[0] is None or bounds[1] is None:
        return query.shape[0] * (key.shape[0] - behind * query.shape[0]), key.shape[0]
    queries, keys = ([after - before for before, after in pairwise(bound)] for bound in bounds if bound is not None)
    pairs = sum(q * (k - behind * q) for q, k in zip(queries, keys, strict=True))
    return pairs, sum(q * k for q, k in zip(queries, keys, strict=True)) / max(sum(queries), 1)


def num_bytes(call: OperatorCall, outs: Sequence[Tensor], device: str = "cuda") -> int:
    """Read and written on `device`. What an operator works on in place counts as both, unless it is overwritten whole;
    of a table that is looked up, and of what is scattered into, only what is touched; of an expanded tensor, what is
    there."""
    name = call.name
    if name in _GATHERS:
        return 2 * _total(outs, device)
    if name == "all_gather_copy_in":  # its own part of a buffer for all ranks
        return 2 * _total(call.args[0], device)
    read, written = _arguments(call)
    if name in _SCATTERS:
        return 3 * _size(tensors_in((call.args, call.kwargs))[-1])
    if name in _SHAPED_LIKE:
        read = []
    elif name not in _OVERWRITES:
        read += [t for t, is_out in written if not is_out]
    return _total(read, device) + _total([*(t for t, _ in written), *outs], device)


def _arguments(call: OperatorCall) -> tuple[list[Tensor], list[tuple[Tensor, bool]]]:
    """Tensors that are only read, and those that are written, with whether they are a place for results."""
    read: list[Tensor] = []
    written: list[tuple[Tensor, bool]] = []
    for position, argument in enumerate(call.func._schema.arguments):
        tensors = tensors_in(call.args[position] if position < len(call.args) else call.kwargs.get(argument.name))
        # Optimizers are said to write gradients, which they do when these come scaled.
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            written += [(t, argument.is_out or argument.kwarg_only) for t in tensors]
        else:
            read += tensors
    return read, written


def _total(tensors: Iterable[Tensor], device: str) -> int:
    """Bytes, every tensor once. A fake tensor has its device beside the one that torch sees."""
    on_device = {id(t): t for t in tensors if getattr(t, "fake_device", t.device).type == device}
    return sum(map(_size, on_device.values()))


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def kernel(call: OperatorCall, outs: Sequence[Tensor], ends: Ends = unknown, device: str = "cuda") -> Kernel:
    """Return the launches of one call. `ends`: the values of a tensor of integers, if they are known."""
    name, args, work = call.name, call.args, flops(call, ends)
    moved = num_bytes(call, outs, device)
    if not work:
        return Kernel("memory", 0.0, moved)
    is_backward = name.endswith("backward")
    if name.startswith("_flash_attention"):
        return Kernel("attention", work, moved, size=_pairs(call, ends)[1], is_backward=is_backward)
    factor = args[1] if "add" in name else args[0]
    if name.startswith(_SDPA) and factor.dtype != torch.float32:
        return Kernel("attention", work, moved, size=args[1].shape[2], is_backward=is_backward)
    # Sums of experts' gradients are one kernel for each expert.
    number = max(1, len(args[3])) if name == "add_grouped_" else 1
    # A GEMM that accumulates reads and writes its sum.
    adds = 2 * _size(args[0]) if "add" in name and args[0].dtype == torch.float32 != args[1].dtype else 0
    bits = 8 * factor.dtype.itemsize
    if name == "_grouped_mm" and bits < 32:
        return Kernel("grouped", work, moved, bits=bits, size=_rows_of_a_group(*args[:3]))
    if name == "_scaled_grouped_mm_v2":
        return Kernel("grouped", work, moved, bits=bits, size=_rows_of_a_group(args[0], args[1], args[_ENDS]))
    return Kernel("gemm_fp8" if bits == 8 else "gemm", work, moved, bits=bits, adds=adds, number=number)


def _rows_of_a_group(a: Tensor, b: Tensor, ends: Tensor | None = None) -> float:
    """Tokens of an expert, on average: of rows times matrices, of sums over rows, or of padded groups."""
    if a.dim() == 3:
        return a.shape[1]
    if b.dim() == 3:
        return a.shape[0] / max(len(b), 1)
    return a.shape[1] / max(len(ends) if ends is not None else 1, 1)
