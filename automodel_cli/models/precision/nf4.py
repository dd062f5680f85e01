"""Frozen base of QLoRA (Dettmers et al. 2023): 4-bit weights of linear layers with `bitsandbytes`.

NF4 in blocks of 64 weights with doubly quantized scales: 4.127 bits per weight. A packed weight is not a parameter, so
it is neither sharded, cast, optimized nor saved. Every data-parallel rank holds all of it. A resumed run packs the
checkpoint's weights again, with bitwise-identical results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.distributed.typed_torch import modules_of

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

BYTES_PER_WEIGHT = (4 + 8 / 64 + 32 / (64 * 256)) / 8


class NF4Linear(nn.Module):
    """A linear layer `[out_features, in_features]` whose weight is packed when loaded. The bias is not packed."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        self._packed: Tensor | None = None
        self._state: QuantState | None = None
        self.instead: Callable[[], Tensor] | None = None
        """If set, each call computes with the weight that it returns."""

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def is_unloaded(self) -> bool:
        """Whether there is no packed weight yet, as in a plan."""
        return self._packed is None

    def unloaded(self) -> Tensor:
        """Weight as in the checkpoint: its shape and dtype, on the meta device."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def pack(self, weight: Tensor, device: torch.device) -> None:
        """Set the full weight in the checkpoint's precision. It is packed on `device`, where it stays."""
        from bitsandbytes.functional import quantize_4bit

        on_device = weight.detach().to(device, self.dtype).contiguous()
        self._packed, self._state = quantize_4bit(on_device, quant_type="nf4", compress_statistics=True)

    def dequantized(self) -> Tensor:
        """The weight that this layer computes with, in the storage dtype."""
        from bitsandbytes.functional import dequantize_4bit

        assert self._packed is not None, "weights come by load_weights"
        weight: Tensor = dequantize_4bit(self._packed, self._state)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        if self.instead is not None:
            return F.linear(x, self.instead().to(x.dtype), self.bias)
        if x.is_meta:  # a plan needs shapes; like the 4-bit GEMM, this saves nothing for backward
            return x[..., :1].expand(*x.shape[:-1], self.out_features).clone()
        assert self._packed is not None, "weights come by load_weights"
        result: Tensor = matmul_4bit(x, self._packed, self._state, bias=self.bias)
        return result


def packed_layers(module: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """(name, layer) of all of them in `module`."""
    return modules_of(module, NF4Linear)


def num_packed(module: nn.Module) -> int:
    """Weights in 4 bits, which no count of parameters has."""
    return sum(layer.num_weights for _, layer in packed_layers(module))
