"""QLoRA: 4-bit weights compute as the same weights rounded by bitsandbytes in plain layers, and are exported so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf, rounds_weights, trained_values
from automodel_cli.models.checkpoint_io.export_check import Precision, measure_export_error
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision.nf4 import BYTES_PER_WEIGHT, NF4Linear, num_packed, packed_layers
from tests.exports import verify_export
from tests.tiny import build_hf, packed_batch, token_row

functional = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
LORA = LoRAConfig(rank=4, alpha=8.0, quantization="nf4")
ROWS = [[token_row(9), token_row(6, 1)], [token_row(15, 2)]]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(weight: torch.Tensor) -> torch.Tensor:
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return functional.dequantize_4bit(packed, state)


def write_rounded(source: Path, target: Path) -> None:
    """The checkpoint with every linear layer of its decoder layers rounded to NF4."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(tuple(f"{leaf}.weight" for leaf in LINEAR)):
            tensors[name] = rounded(tensor)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def built(folder: Path, config: LoRAConfig = LORA) -> tuple[ModelPart, ModelConfig]:
    model = ModelConfig(pretrained=str(folder), lora=config)
    part = build_part(model)
    load_weights(part, model, device="cpu", seed=0)
    return part, model


def three_steps(part: ModelPart) -> list[torch.Tensor]:
    """Log-probs before each step and after the last, large steps on the adapters."""
    batch = packed_batch(ROWS)
    optimizer = torch.optim.SGD([p for p in part.parameters() if p.requires_grad], lr=0.5)
    seen = []
    for _ in range(4):
        logprobs_BT = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
        seen.append(logprobs_BT.detach())
        logprobs_BT.mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(("family", "dora"), [("llama", False), ("qwen2", True)])  # qwen2's projections have biases
def test_it_trains_as_adapters_on_the_rounded_weights(family: str, dora: bool, tmp_path: Path):
    packed = replace(LORA, use_dora=dora)
    build_hf(family).save_pretrained(tmp_path / "base")
    write_rounded(tmp_path / "base", tmp_path / "rounded")
    part, _ = built(tmp_path / "base", packed)
    plain, _ = built(tmp_path / "rounded", replace(packed, quantization="none"))
    precise, _ = built(tmp_path / "base", replace(packed, quantization="none"))
    got, want, other = three_steps(part), three_steps(plain), three_steps(precise)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=2e-5)
    assert (want[0] - want[-1]).abs().max() > 1e-2 and (got[0] - other[0]).abs().max() > 1e-3, "the test shows nothing"
    trained = {name: param for name, param in part.named_parameters() if param.requires_grad}
    of_plain = {name: param for name, param in plain.named_parameters() if param.requires_grad}
    assert trained.keys() == of_plain.keys()
    assert all(torch.allclose(param, of_plain[name], rtol=1e-4, atol=1e-6) for name, param in trained.items())


@pytest.mark.parametrize(("dtype", "dora"), [(torch.float32, True), (torch.bfloat16, False)])
def test_its_export_is_the_model_that_was_trained(dtype: torch.dtype, dora: bool, tmp_path: Path):
    build_hf("llama").to(dtype).save_pretrained(tmp_path / "base")
    part, config = built(tmp_path / "base", replace(LORA, use_dora=dora))
    three_steps(part)
    batch = packed_batch(ROWS)
    before = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    export_hf([part], config, None, tmp_path / "out")
    prompts = [token_row(12, 4).tolist()]
    precision = Precision(part.model.dtype, rounds_weights=rounds_weights([part]))
    found = measure_export_error(tmp_path / "out", prompts, trained_values([part], prompts), precision)
    assert found.passed and (found.worst < 1e-5 or dtype == torch.bfloat16)
    assert verify_export(tmp_path / "base", [part], prompts) > 1e-3
    assert torch.equal(part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT, before), (
        "the model is as it was"
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert all(tensor.dtype == dtype for tensor in exported.values())


def test_packed_weights_take_the_bytes_that_plans_count(tmp_path: Path):
    build_hf("llama", hidden_size=256, intermediate_size=1024).save_pretrained(tmp_path / "base")
    part, _ = built(tmp_path / "base")
    tensors = []
    for _, layer in packed_layers(part):
        state = layer._state
        tensors += [layer._packed, state.absmax, state.state2.absmax]
    assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(num_packed(part) * BYTES_PER_WEIGHT, rel=1e-2)
    names = {name for name, _ in part.named_parameters()} | {name for name, _ in part.named_buffers()}
    assert not any("base_layer.weight" in name for name in names), "nothing that a strategy would shard or save"
    assert all(isinstance(layer, NF4Linear) for _, layer in packed_layers(part))
