"""4 and 8 bit checkpoints: every part that can be asked for equals the library's dequantisation of the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.dequantize import dequantized
from tests.exports import verify_export
from tests.quantize import to_fp8, to_mxfp4
from tests.tiny import build_hf


class _Stored:
    """A tensor as a safetensors slice shows it."""

    def __init__(self, tensor):
        self._tensor = tensor

    def get_shape(self):
        return list(self._tensor.shape)

    def __getitem__(self, index):
        return self._tensor[index]


def _ranges(size):
    return [slice(None), slice(0, size // 2), slice(size // 2, size), slice(3, size - 1), slice(5, 5)]


def test_any_part_of_mxfp4_equals_the_librarys_dequantisation():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (8, 12, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 150, (8, 12, 3), dtype=torch.uint8, generator=generator)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    tensors = {"e.down_proj_blocks": _Stored(blocks), "e.down_proj_scales": _Stored(scales), "norm": _Stored(blocks)}
    lazy = dequantized(tensors, {"quant_method": "mxfp4"})
    assert lazy.keys() == {"e.down_proj", "norm"}
    down = lazy["e.down_proj"]
    assert down.get_shape() == list(want.shape) and torch.equal(down[...], want)
    for index in itertools.product(*[_ranges(size) for size in want.shape]):
        assert torch.equal(down[index], want[index]), index


def test_any_part_of_fp8_equals_weight_times_the_scale_of_its_block():
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(50, 40, generator=generator) * 8).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, generator=generator)
    want = weight.float() * scale.repeat_interleave(24, 0)[:50].repeat_interleave(16, 1)[:, :40]
    tensors = {"w": _Stored(weight), "w_scale_inv": _Stored(scale)}
    lazy = dequantized(tensors, {"quant_method": "fp8", "weight_block_size": [24, 16]})
    assert lazy.keys() == {"w"}
    for index in itertools.product(_ranges(50), _ranges(40)):
        assert torch.equal(lazy["w"][index], want[index]), index
    assert torch.equal(lazy["w"][7:9], want[7:9])


@pytest.mark.parametrize("family, quantize", [("gpt_oss", to_mxfp4), ("deepseek_v3", to_fp8), ("qwen3", to_fp8)])
def test_a_quantised_checkpoint_is_loaded_and_exported_in_full(tmp_path: Path, family, quantize):
    build_hf(family).bfloat16().save_pretrained(tmp_path / "hub")
    values = quantize(tmp_path / "hub")
    config = ModelConfig(pretrained=str(tmp_path / "hub"))
    part = build_part(config)
    report = load_weights(part, config, device="cpu", seed=0)
    assert not report.unclaimed
    loaded = dict(part.model.named_parameters())
    compared = 0
    for key, value in values.items():
        if key in loaded:  # the others are experts, fused in memory; the export below shows them under the hub's key
            assert torch.equal(loaded[key], value.float()), key
            compared += 1
    assert compared > 4
    export_hf([part], config, None, tmp_path / "export")
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "export" / "model.safetensors")
    patterns = part.model._keep_in_fp32_modules_strict or ()
    for key, value in values.items():
        kept = torch.float32 if any(pattern in key for pattern in patterns) else torch.bfloat16
        assert exported[key].dtype == kept and torch.equal(exported[key], value.to(kept)), key
    assert verify_export(tmp_path / "export", [part], [[5, 6, 7, 8]]) < 0.1  # bfloat16 against float32
