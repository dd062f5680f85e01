"""Checkpoints in the hub's 4 and 8 bit formats, made from a plain one, with the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_BLOCK = (24, 16)  # divides neither side of most tiny matrices


def to_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Rewrite a GPT-OSS checkpoint of one file with random mxfp4 experts. Returns the experts that they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    state, generator, values = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0), {}
    for key in [k for k in state if k.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = state.pop(key).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
    _rewrite(folder, state, {"quant_method": "mxfp4"})
    return values


def to_fp8(folder: Path) -> dict[str, Tensor]:
    """Rewrite a checkpoint of one file with its layers' matrices in block-scaled fp8. Returns all values it stands
    for, by hub key."""
    state = load_file(folder / "model.safetensors")
    values = dict(state)
    for key in [k for k, v in state.items() if v.ndim == 2 and ".layers." in k and "gate.weight" not in k]:
        weight, scales = state.pop(key).float(), {}
        stored, value = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for r, rows in enumerate(torch.arange(weight.shape[0]).split(FP8_BLOCK[0])):
            for c, columns in enumerate(torch.arange(weight.shape[1]).split(FP8_BLOCK[1])):
                block = weight[rows[:, None], columns]
                scales[r, c] = block.abs().max() / 448
                stored[rows[:, None], columns] = (block / scales[r, c]).to(torch.float8_e4m3fn)
                value[rows[:, None], columns] = stored[rows[:, None], columns].float() * scales[r, c]
        shape = [n + 1 for n in max(scales)]
        state[key] = stored
        state[f"{key}_scale_inv"] = torch.stack([scales[r, c] for r in range(shape[0]) for c in range(shape[1])]).view(
            shape
        )
        values[key] = value
    _rewrite(folder, state, {"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK)})
    return values


def _rewrite(folder: Path, state: dict[str, Tensor], quantization: dict) -> None:
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
