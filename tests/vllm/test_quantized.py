"""vLLM's log-probs of exports of quantization-aware training, beside those of the forward pass of training.

vLLM parses, loads and joins. Where its CPU build has no kernel of a format, `dequantizing.py` multiplies.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from automodel_cli.distributed.qat.linear import settle, switched
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.qat_config import QATConfig
from tests import tiny
from tests.exports import logprobs_of, nudged

ROOT = Path(__file__).parents[2]
VLLM = os.environ.get("AUTOMODEL_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM, reason="AUTOMODEL_VLLM names no environment with vLLM"),
    pytest.mark.timeout(1200),
]

# Sizes that vLLM's CPU kernels know.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128}
ROWS = [tiny.token_row(40, seed).tolist() for seed in range(4)]


class Export(NamedTuple):
    """Options of an export, and by which scheme and kernel vLLM computes it."""

    qat: dict[str, Any]
    used: str
    family: str = "qwen3"
    lora: LoRAConfig | None = None


# Experts are first, because the first engine of a process makes its groups.
EXPORTS = {
    "int4 experts": Export({}, "IntegerExperts", "qwen3_moe"),
    "int8 experts": Export({"weight_dtype": "int8"}, "IntegerExperts", "qwen3_moe"),
    "mxfp4 experts": Export({"weight_dtype": "mxfp4"}, "MxFp4Experts", "qwen3_moe"),
    "int4": Export({}, "CompressedTensorsWNA16"),
    "int4, adapters": Export({}, "CompressedTensorsWNA16", lora=LoRAConfig(rank=4)),
    "int8": Export({"weight_dtype": "int8"}, "CompressedTensorsWNA16 Integers"),
    "fp8": Export({"weight_dtype": "fp8"}, "CompressedTensorsW8A16Fp8 Fp8"),
    "mxfp4": Export({"weight_dtype": "mxfp4"}, "CompressedTensorsW4A4Mxfp4 MxFp4"),
    "nvfp4": Export({"weight_dtype": "nvfp4"}, "CompressedTensorsW4A4Fp4 NvFp4"),
    "int4, int8 inputs": Export({"activation_dtype": "int8"}, "CompressedTensorsWNA8Int"),
    "int4, fp8 inputs": Export({"activation_dtype": "fp8"}, "CompressedTensorsW4A8Fp8 Integers"),
    "int8, int8 inputs": Export({"weight_dtype": "int8", "activation_dtype": "int8"}, "CompressedTensorsW8A8Int8"),
    "fp8, fp8 inputs": Export(
        {"weight_dtype": "fp8", "activation_dtype": "fp8"},
        "CompressedTensorsW8A8Fp8 ChannelWiseTorchFP8ScaledMMLinearKernel",
    ),
    "fp8 experts": Export({"weight_dtype": "fp8"}, "", "qwen3_moe"),
}


def exported(folder: Path, name: str) -> dict[str, Tensor]:
    """Write the export. Return the log-probs of our forward pass: quantized, weights only, and not quantized."""
    export = EXPORTS[name]
    tiny.build_hf(export.family, **SIZES).save_pretrained(folder / "base" / name)
    qat = QATConfig(**export.qat)
    config = ModelConfig(pretrained=str(folder / "base" / name), dtype="float32", lora=export.lora, qat=qat)
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    settle(part, torch.float32)
    nudged(part.eval())
    export_hf([part], config, None, folder / name)
    settings = {"quantized": (True, True), "weights": (True, False), "plain": (False, False)}
    found = {}
    for key, (active, activations) in settings.items():
        with switched([part], active=active, activations=activations):
            found[key] = torch.stack([logprobs_of(part, row) for row in ROWS])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {name: exported(folder, name) for name in EXPORTS}


@pytest.fixture(scope="module")
def answers(folder: Path, ours: object) -> dict[str, dict[str, Any]]:
    (folder / "asked.json").write_text(json.dumps([{name: str(folder / name) for name in EXPORTS}, ROWS]))
    environment = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all engines in one process
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [f"{VLLM}/bin/python", "-m", "tests.vllm.quantized", folder / "asked.json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return found


@pytest.mark.parametrize("name", [name for name, export in EXPORTS.items() if export.used])
def test_vllm_has_the_logprobs_of_the_forward_pass(name: str, ours: Any, answers: Any):
    assert any(used.startswith(EXPORTS[name].used) for used in answers[name]["used"]), answers[name]["used"]
    # vLLM does not round inputs in this format, unless another kernel is asked for.
    wanted = ours[name]["weights" if name == "int4, int8 inputs" else "quantized"]
    found = torch.tensor(answers[name]["logprobs"])
    gaps = (found - wanted).abs()
    # A rounded input that is halfway between two codes may be another code here.
    assert (gaps.median() if "inputs" in name else gaps.max()) < 1e-5
    assert (found - ours[name]["plain"]).abs().median() > 1e-3


def test_vllm_reads_no_experts_in_fp8_without_inputs_in_fp8(answers: Any):
    """If this fails, the page of QAT is out of date."""
    assert "only format: pack-quantized" in answers["fp8 experts"]["error"]
