"""FLOPs against numbers worked out by hand and against the matrices of the real models (built on the meta device)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig

from automodel_cli.config.parameter_patterns import Selection
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.freezing import freeze, trained_work
from automodel_cli.models.model_part import ModelPart
from automodel_cli.training.metrics.flops import (
    TrainedPart,
    device_peak_flops,
    model_flops_utilisation,
    training_flops_per_token,
)

LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "llama": COMMON,
    "qwen3": COMMON,
    "gemma3_text": COMMON,
    "olmo2": {k: v for k, v in COMMON.items() if k != "head_dim"},
    "gpt_neox": {k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "starcoder2": {k: v for k, v in COMMON.items() if k != "head_dim"},
    "qwen3_moe": {**COMMON, **MOE, "mlp_only_layers": [0]},
    "qwen2_moe": {**{k: v for k, v in COMMON.items() if k != "head_dim"}, **MOE, "shared_expert_intermediate_size": 40},
    "gpt_oss": {**COMMON, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {**COMMON, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**COMMON, **MLA},
}


def config(model_type: str, **fields):
    return AutoConfig.for_model(model_type, **fields)


def num_matrices(hf) -> float:
    """Matrix parameters that a token passes through: training on documents without length costs 6 each."""
    flops = training_flops_per_token(hf, 0)
    assert flops is not None
    return flops / 6


def test_llama3_8b_by_hand():
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    mlp = 3 * 4096 * 14336
    matrices = 32 * (attention + mlp) + 4096 * 128256
    assert matrices == 7_504_658_432  # 8.03 billion less one embedding table and the norms
    hf = config(**LLAMA3_8B)
    assert training_flops_per_token(hf, 8192) == 6 * matrices + 12 * 32 * 4096 * 8192
    assert training_flops_per_token(hf, 8192) == pytest.approx(5.7913e10, rel=1e-4)


def test_a_head_of_one_value_counts_one_output_of_a_token():
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert training_flops_per_token(config(**LLAMA3_8B), 0, num_outputs=1) == 6 * (layers + 4096)


@pytest.mark.skipif(not hasattr(Gemma4TextConfig(), "per_layer_config"), reason="an older release has other fields")
def test_layers_with_wider_heads_count_their_own_matrices():
    """Gemma 4: layers with full attention have heads of 512, others of 256. Both have 8, and 4 for keys and values."""
    config = Gemma4TextConfig()
    narrow, wide = (2 * 2304 * (8 + 4) * head_dim + 3 * 2304 * 9216 for head_dim in (256, 512))
    matrices = 25 * narrow + 5 * wide + 2304 * 262144
    assert training_flops_per_token(config, 0.0) == 6 * matrices


def test_mixtral_counts_two_of_eight_experts():
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 4096 * 8
    matrices = 32 * layer + 4096 * 32000
    assert matrices == 12_748_587_008  # "13B active"
    assert num_matrices(config(**MIXTRAL_8X7B)) == matrices


def matrices_of_the_model(hf) -> int:
    """Every matrix of the real model but the embeddings; of stacked experts the share that a token meets."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    text = hf.get_text_config()
    total = head.numel()
    for name, param in model.named_parameters():
        if id(param) in embeddings or param is head or param.ndim < 2 or name.endswith("bias"):
            continue
        if param.ndim == 3:
            total += param.numel() // param.shape[0] * text.num_experts_per_tok
        else:
            total += param.numel()
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_those_of_the_real_model(family):
    hf = config(family, **FAMILIES[family])
    assert num_matrices(hf) == matrices_of_the_model(hf)


def test_sliding_windows_bound_the_context():
    windows = ["sliding_attention", "full_attention"] * 2
    hf = config("gpt_oss", **FAMILIES["gpt_oss"], sliding_window=10, layer_types=windows)
    n = num_matrices(hf)
    assert training_flops_per_token(hf, 100) == 6 * n + 6 * (4 * 32) * (2 * 10 + 2 * 100)
    assert training_flops_per_token(hf, 7) == 6 * n + 6 * (4 * 32) * 4 * 7
    mistral = config("mistral", **COMMON, sliding_window=10)
    assert training_flops_per_token(mistral, 100) == 6 * num_matrices(mistral) + 6 * (4 * 32) * 4 * 10
    qwen = config("qwen3", **COMMON, sliding_window=10, use_sliding_window=False)
    assert training_flops_per_token(qwen, 100) == 6 * num_matrices(qwen) + 6 * (4 * 32) * 4 * 100


def test_lora_leaves_out_the_weight_gradients_of_the_base():
    hf = config("llama", **COMMON)
    n, attention = num_matrices(hf), 6 * 4 * (4 * 32) * 64
    assert training_flops_per_token(hf, 64, frozen_base=True, num_adapter_params=500) == 4 * n + 3000 + attention


def part_of(model_type: str, fields: dict, scores: int = 0) -> ModelPart:
    model = ModelConfig(config={"model_type": model_type, **fields})
    return build_part(model, request=HeadRequest(scores=scores, logprobs=not scores))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_a_model_without_frozen_parameters_is_counted_the_same_by_its_parameters(family: str) -> None:
    part = part_of(family, FAMILIES[family])
    trained = TrainedPart(*trained_work(part, logits=True))
    hf = part.source_config
    assert trained.first_layer == 0
    assert training_flops_per_token(hf, 64, trained=trained) == training_flops_per_token(hf, 64)


@pytest.mark.parametrize(
    "patterns", [["*embed_tokens*", "*layers.0.*"], ["*embed_tokens*", "*.mlp.*"], ["model.*"], ["*layers.*"]]
)
def test_frozen_parameters_cost_what_torch_counts(patterns: list[str]) -> None:
    """`FlopCounterMode` counts the GEMMs of a real forward and backward."""
    part = part_of("llama", COMMON)
    freeze(part, Selection(freeze=tuple(patterns)))
    model = AutoModelForCausalLM.from_config(part.source_config, attn_implementation="eager")
    flags = {part.hub_name(name): param.requires_grad for name, param in part.named_parameters()}
    for name, param in model.named_parameters():
        param.requires_grad_(flags[name])
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(64)[None], use_cache=False).logits.sum().backward()
    trained = TrainedPart(*trained_work(part, logits=True))
    assert training_flops_per_token(part.source_config, 64, trained=trained) * 64 == counter.get_total_flops()


def test_a_classifier_on_a_frozen_model_has_no_backward_below_its_scores() -> None:
    part = part_of("llama", COMMON, scores=3)
    freeze(part, Selection(trainable=("value_head.*",)))
    first, matrices = trained_work(part, logits=False)
    assert (first, matrices) == (4, 3 * 32)
    layers = num_matrices(part.source_config) - 32 * 96
    flops = training_flops_per_token(part.source_config, 64, num_outputs=3, trained=TrainedPart(first, matrices))
    assert flops == 2 * (layers + 3 * 32) + 2 * 3 * 32 + 2 * 4 * (4 * 32) * 64


def test_a_depth_of_multi_token_prediction_is_a_layer_a_projection_and_a_head() -> None:
    hf = config("llama", **COMMON)
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48
    depth = 6 * (layer + 2 * 32 * 32 + 32 * 96) + 6 * (4 * 32) * 64
    assert training_flops_per_token(hf, 64, num_depths=2) == training_flops_per_token(hf, 64) + 2 * depth


def test_layers_of_unknown_cost_have_no_figure():
    hf = config("qwen3_next", **COMMON, layer_types=["linear_attention", "full_attention"] * 2)
    assert training_flops_per_token(hf, 64) is None
    assert training_flops_per_token(config("mamba", num_hidden_layers=2, hidden_size=8), 64) is None


def test_peaks_and_mfu():
    assert device_peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert device_peak_flops("NVIDIA H100 PCIe") == 756.5e12
    assert device_peak_flops("NVIDIA GB200") == 2500e12
    assert device_peak_flops("NVIDIA L40S") == 362e12
    assert device_peak_flops("NVIDIA A10G") == 70e12
    assert device_peak_flops("AMD EPYC") is None
    assert model_flops_utilisation(6e9, 1e6, 8, 1e15) == pytest.approx(0.75)
    assert model_flops_utilisation(None, 1e6, 8, 1e15) is None
    assert model_flops_utilisation(6e9, None, 8, 1e15) is None
