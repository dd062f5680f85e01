"""Settings of fake quantization, and the weight that is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from automodel_cli.distributed.qat.formats import Format


class LowRank(NamedTuple):
    """Update `scale * b_OR @ a_RI` of a frozen weight."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float


@dataclass
class FakeQuantization:
    """Settings and state that all quantized layers of a model share.

    compute_dtype: weights are rounded to it before they are quantized, whatever shards and stores them.
    read_dtype: dtype in which a reader of the export has the weights.
    ignored: names of the linear layers that are not quantized.
    active: false in the first steps of a run.
    exports: whether the export is quantized.
    """

    weights: Format
    activations: Format | None
    compute_dtype: torch.dtype = torch.float32
    read_dtype: torch.dtype = torch.float32
    ignored: tuple[str, ...] = ()
    active: bool = True
    exports: bool = True

    def rounded(self, weight: Tensor, low_rank: LowRank | None = None) -> Tensor:
        """Return the weight as the forward pass quantizes it. The sum with an update is formed in fp32."""
        weight = weight.to(self.compute_dtype)
        if low_rank is None:
            return weight
        a, b = (matrix.to(self.compute_dtype).float() for matrix in (low_rank.a_RI, low_rank.b_OR))
        with torch.autocast(weight.device.type, enabled=False):
            # A batch of one, because selective checkpointing would save the result of another GEMM (`KEPT_RESULTS`).
            return torch.baddbmm(weight.float()[None], b[None], a[None], alpha=low_rank.scale)[0].to(self.compute_dtype)
