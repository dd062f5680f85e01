"""Regions on fake tensors: what each kernel reads, writes and saves, without its values.

The operators of a region run once for each combination of shapes, unseen by dispatch modes. Every call creates the
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from automodel_cli.distributed import torch_compat
from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion, R, RegionCompiler, modules_of
from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.distributed.typed_torch import Ctx, Function

OnKernel = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]


ShapeContext = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class _Shape:
    """All that the shapes of results depend on, of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class _Shapes:
    """The results of regions by the shapes of their arguments."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], object] = {}

    def result(self, function: Callable[..., R], args: Sequence[object]) -> R:
        """Return new tensors like those of `function(*args)`."""
        leaves, spec = tree_flatten(args)
        key = (function, spec, *(_Shape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if key not in self._known:
            with torch_compat.only_fakes():
                self._known[key] = tree_map_only(Tensor, _Shape.of, function(*args))
        result: R = tree_map_only(_Shape, _Shape.empty, self._known[key])
        return result


def as_one(shape_context: ShapeContext, on_kernel: OnKernel) -> RegionCompiler:
    """Return a region compiler for fake tensors. Every region saves only the tensors that its backward needs.

    Args:
        shape_context: context in which results are created.
        on_kernel: called as `ran(name, read, written)` for each kernel.
    """

    shapes = _Shapes()

    def fuse(region: FusibleRegion[R]) -> Callable[..., R]:
        def run(*args: object) -> R:
            tensors = tensors_in(args)
            if any(torch_compat.is_dtensor(tensor) for tensor in tensors):
                return region.function(*args)
            parameters = [p for module in modules_of(args) for p in module._parameters.values() if p is not None]
            result: R = _AsOne.apply(region, shapes, shape_context, on_kernel, args, *tensors, *parameters)
            return result

        return run

    return fuse


class _AsOne(Function):
    @staticmethod
    def forward(
        ctx: Ctx,
        region: FusibleRegion[R],
        shapes: _Shapes,
        shape_context: ShapeContext,
        on_kernel: OnKernel,
        args: Sequence[object],
        *tensors: Tensor,
    ) -> R:
        with shape_context():
            result = shapes.result(region.function, args)
        on_kernel(region.name, tensors, tensors_in(result))
        ctx.save_for_backward(*(tensors[i] for i in region.kept or ()))
        ctx.region, ctx.on_kernel = region, on_kernel
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in tensors]
        ctx.of_tokens = [t.ndim > 1 for t in tensors]
        return result

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[5:]
        made = [
            torch.empty(shape, dtype=dtype, device=device) if wants else None
            for (shape, dtype, device), wants in zip(ctx.inputs, needed, strict=True)
        ]
        read = [*ctx.saved_tensors, *grads]
        for many in (True, False):  # Gradients of weights are sums over tokens, in a separate kernel.
            written = [g for g, is_many in zip(made, ctx.of_tokens, strict=True) if g is not None and is_many is many]
            if written:
                ctx.on_kernel(f"{ctx.region.name}, backward", read, written)
        return None, None, None, None, None, *made
