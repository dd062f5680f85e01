"""Kernels of each layer of a model in closed form: those of a forward by shapes, those of its backward by rule.

A trace (`dryrun`) sees every call. Here, one forward on the meta device gives the calls of a layer, and its backward
follows from them:

    y = x W            two GEMMs of the same size, one without a trained W
    attention          one kernel with 2.5 times the FLOPs (FlexAttention: 3.5 times)
    fused region       one kernel that moves twice the bytes
    anything else      one kernel that moves as many bytes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.planning import cost_model
from automodel_cli.planning.kernel import Kernel

_FLASH_BACKWARD, _COMPILED_BACKWARD, _FUSED_BACKWARD = 2.5, 3.5, 2.0
_QUANTIZED = 1.5
"""Bytes that are moved to quantize the factors of a GEMM, relative to its own in 16 bits."""
_BLOCK = 128
"""Queries and keys of a block of FlexAttention, which is computed whole."""


@dataclass(frozen=True)
class Call:
    """A kernel of a forward, and those of its backward: gradients of inputs, and of weights."""

    forward: Kernel
    inputs: tuple[Kernel, ...] = ()
    weights: tuple[Kernel, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether selective recomputation keeps its result."""
        return self.forward.flops > 0

    def scaled(self, products: float, others: float) -> Call:
        """Return a shard of the work."""
        factor = products if self.is_product else others
        inputs, weights = (tuple(kernel.scaled(factor) for kernel in part) for part in (self.inputs, self.weights))
        return Call(self.forward.scaled(factor), inputs, weights)


class Calls:
    """Calls by place: -1 before the first layer, then the layers, then after the last.

    Args:
        parameters: whether a parameter is trained, by its storage.
        document: tokens of each document. None: a row is one document.
        bits: of the GEMMs of linear layers in layers.
        adds: GEMMs of weight gradients add to a float32 sum.
    """

    def __init__(
        self, parameters: dict[StorageWeakRef, bool], *, document: int | None = None, bits: int = 16, adds: bool = False
    ):
        self.parameters, self.document, self.bits, self.adds = parameters, document, bits, adds
        self.at: defaultdict[int, list[Call]] = defaultdict(list)
        self.keys: defaultdict[int, float] = defaultdict(float)
        """Bytes of keys and values."""
        self.is_inside = False
        """Whether a fused region runs, whose operators are one kernel."""

    def ran(self, place: int, call: cost_model.OperatorCall, result: object) -> None:
        """Count an operator of the forward."""
        if self.is_inside or not cost_model.launches(call):
            return
        kernel = cost_model.kernel(call, tensors_in(result), device="meta")
        if not kernel.flops:
            self.at[place].append(Call(kernel, (kernel,)))
            return
        weight = next((t for t in tensors_in(call.args) if _storage(t) in self.parameters), None)
        if weight is not None and self.bits == 8 and kernel.kind == "gemm" and place >= 0:
            quantized = Kernel("memory", 0.0, _QUANTIZED * kernel.bytes)
            self.at[place].append(Call(quantized, (quantized,)))
            kernel = replace(kernel, kind="gemm_fp8", bits=8)
        adds = 8 * weight.numel() if self.adds and weight is not None else 0
        trained = weight is None or self.parameters[_storage(weight)]
        weights = (replace(kernel, adds=adds),) if trained else ()
        self.at[place].append(Call(kernel, (kernel,), weights))

    def region(self, place: int, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Count a fused region."""
        moved = float(sum(t.nbytes for t in {id(t): t for t in (*read, *written)}.values()))
        self.at[place].append(Call(Kernel("memory", 0.0, moved), (Kernel("memory", 0.0, _FUSED_BACKWARD * moved),)))

    def attention(
        self, place: int, tensors: Sequence[Tensor], *, all_pairs: int | None, window: int | None, is_compiled: bool
    ) -> None:
        """Count causal attention of queries `[B, H, T, D]`, keys, values and outputs in documents.

        `all_pairs`: keys that each query meets with a kernel that computes masked pairs too.

        Example: 8,192 tokens in documents of 700 have 8,192 x 350 pairs. A window of 128 leaves each query 128 keys,
        but for the first ones of a document: 128 - 128^2 / 1,400 on average.
        """
        query, key, value, *_ = tensors
        rows, heads, tokens, width = query.shape
        length = self.document or tokens
        # Query i of a document sees min(i, w) keys. The mean over a document of n tokens is w - w^2 / (2 n): n / 2
        # without a window.
        seen = min(window or length, length)
        keys = float(all_pairs or seen - seen**2 / (2 * length) + (_BLOCK if is_compiled else 0))
        flops = 2.0 * rows * heads * tokens * keys * (width + value.shape[-1])
        moved = float(sum(t.nbytes for t in tensors))
        bits = 8 * query.element_size()
        forward = Kernel("attention", flops, moved, bits, size=all_pairs or length, is_compiled=is_compiled)
        times = _COMPILED_BACKWARD if is_compiled else _FLASH_BACKWARD
        backward = replace(forward, flops=times * flops, bytes=2 * moved, is_backward=True)
        self.at[place].append(Call(forward, (backward,)))
        self.keys[place] += key.nbytes + value.nbytes

    def experts(self, place: int, num_rows: int, weights: Sequence[tuple[int, int]], num_local: int, size: int) -> None:
        """Count distributed experts with evenly routed tokens.

        Args:
            num_rows: received (token, expert) pairs.
            weights: (inputs, outputs) of each GEMM of an expert.
            size: bytes of an element.
        """
        (hidden, columns), (gated, _) = weights
        moved = [num_rows * (3 * hidden + columns + gated) * size, num_rows * 2 * hidden * size]
        self.at[place] += [Call(kernel, (kernel,)) for kernel in (Kernel("memory", 0.0, n) for n in moved)]
        for inner, outer in weights:
            elements = inner * outer * num_local
            read = (num_rows * (inner + outer) + elements) * size
            # Evenly routed: 8,192 pairs on 8 local experts are 1,024 rows each. The rate of a grouped GEMM depends on
            # it.
            rows = num_rows / num_local
            kernel = Kernel("grouped", 2.0 * num_rows * inner * outer, read, 8 * size, size=rows)
            self.at[place].append(Call(kernel, (kernel,), self._expert_gradients(kernel, elements, num_local)))

    def _expert_gradients(self, kernel: Kernel, elements: int, num_local: int) -> tuple[Kernel, ...]:
        """As `distributed/wgrad_fusion/grouped.py` chooses: a GEMM for each expert that adds to its float32 sum, or one
        grouped GEMM and an addition."""
        if not self.adds:
            return (kernel,)
        if gemm_timings.adds_faster(kernel.size, elements // num_local):
            return (replace(kernel, kind="gemm", adds=8 * elements, number=num_local),)
        return kernel, Kernel("memory", 0.0, 10 * elements)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
