"""Small random Hugging Face models and packed batches, shared by the tests.

Each family keeps what is peculiar about it at hidden size 64: GPT-OSS sinks and windows, DeepSeek-V3 latent attention
and sigmoid router, Gemma-2 soft caps, Gemma-3 windows and tied embeddings, Granite scales, Qwen3 q/k norms. Weights are
perturbed well above their init noise, so that a parity failure shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from automodel_cli.parity.batches import next_token_labels, packed_batch, token_row
from automodel_cli.parity.gradient_errors import full
from automodel_cli.parity.reference import reference_logprobs

__all__ = [
    "full",
    "next_token_labels",
    "packed_batch",
    "reference_logprobs",
    "token_row",
]  # of the package, for the tests

VOCAB = 160
NUM_LAYERS = 4
WINDOW = 6

_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_EXTRA: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
    "qwen3_moe": {**_MOE, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    },
    "deepseek_v3": {
        **_MOE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
    },
}
FAMILIES: tuple[str, ...] = tuple(_EXTRA)


def tiny_fields(family: str, **extra) -> dict:
    """The config as YAML would give it: plain fields with `model_type`."""
    fields = {"model_type": family, **_BASE, **_EXTRA[family], **extra}
    if "layer_types" in fields and "layer_types" not in extra:
        num_layers = fields["num_hidden_layers"]
        fields["layer_types"] = (fields["layer_types"] * num_layers)[:num_layers]
    return fields


def tiny_config(family: str, **extra) -> PretrainedConfig:
    """The library's config object of a family; `extra` overrides fields."""
    fields = tiny_fields(family, **extra)
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def build_hf(family: str, seed: int = 0, **extra) -> PreTrainedModel:
    """A random fp32 model in train mode, on the library's eager attention: the dumbest reference there is."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **extra), attn_implementation="eager").float()
    perturb(model, seed + 1)
    return model.train()


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Add noise to every parameter and to the router's selection bias (zero at init, so a lost one would not show)."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.add_(torch.randn(param.shape, generator=generator) * 0.05)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.05)


def separate_documents(model: PreTrainedModel, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Log-probs of each document, run alone through the unmodified model: the reference of packing."""
    outputs = []
    for document in (document for row in rows for document in row):
        logits_TV = model(input_ids=document[None], use_cache=False).logits[0]
        outputs.append(reference_logprobs(logits_TV, next_token_labels(document)))
    return outputs


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Full gradients by the module's own parameter names; parameters without one are absent."""
    return {name: full(p.grad).detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(reference: dict[str, Tensor], got: dict[str, Tensor], names: Iterable[str] | None = None) -> float:
    """Largest |difference| relative to the largest reference gradient; a missing gradient is infinite."""
    scale = max(grad.abs().max().item() for grad in reference.values())
    worst = 0.0
    for name in reference if names is None else names:
        want = reference[name]
        if name not in got:
            worst = max(worst, float("inf") if want.abs().max() > 0 else 0.0)
        else:
            worst = max(worst, (got[name] - want).abs().max().item() / scale)
    return worst
