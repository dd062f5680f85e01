"""Model FLOPs per token from a Hugging Face config, and the BF16 peak of a device, for MFU. Torch-free.

Per token, forward and backward (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B):

    6 N + 6 * sum over layers of H * (d_qk + d_v) * C        (PaLM's 12 L H Q T when d_qk = d_v = Q and C = T)

N: matrix parameters that a token passes through. These are all linear layers and the LM head. Of a mixture of experts,
they are the selected and shared experts and the router. Embedding table (a lookup), norms and biases are excluded.
H: number of query heads. Grouped-query attention saves cache, but no FLOPs. d_qk and d_v: head sizes.
C: tokens that a query attends to: its document length, at most the window in layers with a sliding window. Causal
masking is not subtracted. Recomputed activations do not count, so that recomputation does not raise MFU.

Forward, gradients of inputs and gradients of weights are 2 N each. Frozen matrices have no gradients of weights, and
layers below the first trained one have no backward at all, neither have their attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The MLP has two matrices instead of three (no gate).
_UNGATED = frozenset(
    {
        "arcee", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
        "gptj", "mpt", "nemotron", "opt", "phi", "starcoder2",
    }
)  # fmt: skip
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Dense BF16 with FP32 accumulation, without sparsity, in TFLOP/s, from the vendors' data sheets. The first match wins.
_PEAK_TFLOPS = (
    ("GB300", 2500.0),
    ("B300", 2500.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI355X", 2516.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


def device_peak_flops(device_name: str) -> float | None:
    """Return the BF16 FLOP/s of a device by its name (`torch.cuda.get_device_name()`), or None if unknown."""
    for name, teraflops in _PEAK_TFLOPS:
        if name in device_name:
            return teraflops * 1e12
    return None


def model_flops_utilisation(
    flops_per_token: float | None, tokens_per_second: float | None, num_devices: int, peak: float | None
) -> float | None:
    """Return MFU in 0..1, or None if a factor is unknown. `tokens_per_second` covers all devices."""
    if flops_per_token is None or tokens_per_second is None or peak is None:
        return None
    return flops_per_token * tokens_per_second / (num_devices * peak)


@dataclass(frozen=True)
class _Layer:
    """Matrix parameters that one token passes through, and sizes of its attention GEMMs."""

    matrices: int
    heads: int
    qk_and_v: int
    window: int | None


@dataclass(frozen=True)
class TrainedPart:
    """What is trained if parameters are frozen by name.

    first_layer: lowest decoder layer with a backward. The number of layers if only the head is trained.
    matrices: trained matrix parameters that a token passes through, without lookups in the embedding table.
    """

    first_layer: int
    matrices: int


def training_flops_per_token(
    hf_config: PretrainedConfig,
    context_length: float,
    *,
    frozen_base: bool = False,
    num_adapter_params: int = 0,
    num_depths: int = 0,
    num_outputs: int | None = None,
    trained: TrainedPart | None = None,
) -> float | None:
    """Return the FLOPs to train on one token (see the module docstring). None for unsupported layers (state space,
    linear).

    Args:
        context_length: mean document length weighted by tokens. For unpacked text: the sequence length.
        frozen_base: LoRA. The backward pass of a frozen matrix has one GEMM instead of two, so 4 N. Adapter parameters
            count 6 each. Attention has no weights, so its backward pass is unchanged.
        num_depths: layers for multi-token prediction. Each costs one layer like the last, a projection of two hidden
            states and the LM head.
        num_outputs: outputs of the head per token. None: logits of the full vocabulary.
        trained: what is trained. None: everything, but for `frozen_base`.
    """
    # Example: Llama-3 8B (32 layers, D = 4,096, 32 heads and 8 KV heads of 128, inner size 14,336, vocabulary 128,256).
    # A layer has 41.9 million weights in attention and 176.2 million in the MLP. At a context of 8,192, attention adds
    # 12.9 GFLOP. A token costs 57.9 GFLOP, or 42.9 with a frozen base. 8,000 tokens per second on an H100 are an MFU of
    # 0.47.
    counted = _layers(hf_config)
    if counted is None:
        return None
    config = hf_config.get_text_config()
    counted += num_depths * counted[-1:]
    head = config.hidden_size * (config.vocab_size if num_outputs is None else num_outputs)
    matrices = sum(layer.matrices for layer in counted) + head + num_depths * (2 * config.hidden_size**2 + head)
    of_attention = [  # The full context, without a factor 1/2 for the causal mask, as usual for MFU.
        layer.heads * layer.qk_and_v * (min(context_length, layer.window) if layer.window else context_length)
        for layer in counted
    ]
    if trained is not None:
        first = trained.first_layer
        below_head = sum(layer.matrices for layer in counted[first:]) + (head if first < len(counted) else 0)
        of_matrices = 2 * (matrices + below_head + trained.matrices)
        of_attention_backward = 4 * sum(of_attention[first:])
    else:
        of_matrices = (4 if frozen_base else 6) * matrices + 6 * num_adapter_params
        of_attention_backward = 4 * sum(of_attention)
    result: float | None = of_matrices + 2 * sum(of_attention) + of_attention_backward
    return result


def _layers(hf_config: PretrainedConfig) -> list[_Layer] | None:
    config = hf_config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    configs = [_of_layer(config, index) for index in range(len(kinds))]
    has_heads = all(isinstance(_get(own, "num_attention_heads"), int) for own in configs)
    if not _ATTENTION_LAYERS.issuperset(kinds) or not has_heads:
        return None
    return [
        _Layer(
            matrices=_attention_matrices(own) + _mlp_matrices(own, index),
            heads=own.num_attention_heads,
            qk_and_v=_qk_and_v(own),
            window=_window(own, kind),
        )
        for index, (own, kind) in enumerate(zip(configs, kinds, strict=True))
    ]


def _of_layer(config: PretrainedConfig, index: int) -> PretrainedConfig:
    """Return the config of one layer. Gemma 4 has wider heads in layers with full attention."""
    return config.per_layer_config[index] if config.to_dict().get("per_layer_config") else config


def _get(config: PretrainedConfig, *names: str, default: object = None) -> Any:
    """Return the first of `names` that the config has and that is not None. Model families use different names."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _head_dim(config: PretrainedConfig) -> int:
    return int(_get(config, "head_dim", default=config.hidden_size // config.num_attention_heads))


def _qk_and_v(config: PretrainedConfig) -> int:
    if _get(config, "kv_lora_rank") is not None:
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * _head_dim(config)


def _window(config: PretrainedConfig, kind: str) -> int | None:
    if kind == "chunked_attention":
        result: int | None = _get(config, "attention_chunk_size")
        return result
    window = _get(config, "sliding_window")
    # Without layer_types (Mistral) every layer has the window. With layer_types only the sliding layers have it.
    everywhere = _get(config, "layer_types") is None and _get(config, "use_sliding_window", default=True)
    return window if kind == "sliding_attention" or everywhere else None


def _attention_matrices(config: PretrainedConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank = _get(config, "kv_lora_rank")
    if rank is not None:  # multi-head latent attention
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        q_rank = _get(config, "q_lora_rank")
        q_out = heads * (nope + rope)
        q = hidden * q_out if q_rank is None else (hidden + q_out) * q_rank
        return int(q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden)
    head_dim = _head_dim(config)
    kv_heads = _get(config, "num_key_value_heads", default=heads)
    return int(2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim)


def _mlp_matrices(config: PretrainedConfig, layer: int) -> int:
    hidden = config.hidden_size
    dense = _get(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    per_expert = _get(config, "moe_intermediate_size", default=dense)
    experts = _get(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    products = 2 if config.model_type in _UNGATED else 3
    if not experts or not _is_sparse(config, layer):
        return int(products * hidden * dense)
    active = _get(config, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", default=1)
    shared = _get(config, "shared_expert_intermediate_size", default=0)
    shared_gate = hidden if shared else 0
    shared = shared or _get(config, "n_shared_experts", default=0) * per_expert
    # Only the experts of a token count, and the router (hidden x experts).
    return int(3 * hidden * (active * per_expert + shared) + shared_gate + hidden * experts)


def _is_sparse(config: PretrainedConfig, layer: int) -> bool:
    """Return whether this layer has experts. Model families declare this in four ways."""
    kinds = _get(config, "mlp_layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    if layer in _get(config, "mlp_only_layers", default=()):
        return False
    if layer < _get(config, "first_k_dense_replace", default=0):
        return False
    return bool((layer + 1) % _get(config, "decoder_sparse_step", default=1) == 0)
