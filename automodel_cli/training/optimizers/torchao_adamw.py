"""torchao's 8-bit AdamW with a state that resumes as 8 bits. Imports torchao; only `AdamW8bit.build` imports this."""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as TorchAOAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from automodel_cli.distributed.tensors import to_local

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class QuantizedAdamW(TorchAOAdamW8bit):  # type: ignore[misc]
    """Checkpoints hold dequantized moments, because another layout shards them differently. Loading quantizes them
    again.

    With the same blocks, this restores the same codes, and the scales up to their last bit.
    """

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            for key in _SIGNED.keys() & state.keys():
                loaded = to_local(state[key])
                state[key] = self._new_buffer(param, _SIGNED[key])
                target = to_local(state[key])
                if isinstance(target, OptimState8bit):
                    _quantise(loaded, target)
                else:
                    target.copy_(loaded)  # torchao does not quantize small tensors


def _quantise(values: Tensor, target: OptimState8bit) -> None:
    """Codes and scales of dequantised `values`, written into `target`.

    The table of codes ends at +1, but at -0.993 below zero: a block whose largest value was negative came back smaller.
    torchao's copy would use that as the scale of the block and shift every code.
    """
    blocks = values.reshape(-1, target.block_size)
    table = target.qmap
    scale = blocks.amax(-1) / table[-1]
    if table[0] < 0:
        scale = torch.maximum(scale, blocks.amin(-1) / table[0])
    scale = scale.clip(1e-12)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.searchsorted(middles, (blocks / scale[:, None]).contiguous())
    target.codes.copy_(codes.reshape(target.codes.shape))
    target.scale.copy_(scale)
