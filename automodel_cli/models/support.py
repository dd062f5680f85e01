"""Can this model train on packed rows? Measured on a shrunken random copy of the user's own config, before anything
is built.

Cheap structural rules give a good message for known reasons; the measurement decides for everything else: two
documents in one row must give what each gives alone under the library's own eager attention. Nothing is cached: it takes about 0.1 s.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import attention as packed
from automodel_cli.models import compat
from automodel_cli.models.part import model_inputs_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ISOLATED = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE = ("conv1d", "A_log", "dt_bias", "short_conv", "recurrent_gate", "rg_lru", "x_proj")
_DOCUMENTS = (13, 9)  # longer than every shrunken window, chunk and index size, or a leak would hide
_TOLERANCE = 1e-4  # of the largest hidden value; a leak is 1e-2 and more
_MAX_FALLBACK_PARAMS = 300_000_000

# What a config calls its sizes. Values are set only where the field exists and is not None, and never enlarged.
_SIZES: dict[str, int] = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "n_head": 4,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 128,
    "sliding_window": 4,
    "attention_window_size": 4,
    "attention_chunk_size": 4,
    "index_topk": 4,
    "max_position_embeddings": 2048,
    "query_pre_attn_scalar": 16,
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MAX_DEPTH = 12


def probe_packing(
    hf_config: PretrainedConfig, *, attention: str = packed.PACKED, trust_remote_code: bool = False
) -> None:
    """Raise ConfigError, naming the layer, when documents of one packed row would influence each other.

    The config is not changed. A config that cannot be built small is refused as unknown.
    """
    _refuse_by_rule(hf_config)
    if attention == packed.PACKED:
        packed.register()
    with compat.quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        difference, where = _measure(hf_config, attention, trust_remote_code)
    if difference > _TOLERANCE:
        raise _leak(hf_config, f"{where} lets a packed row's documents influence each other (by {difference:.1e})")


def _leak(hf_config: PretrainedConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"{hf_config.model_type} cannot train on packed rows: {reason}", keys=("data.packing",), fix="data.packing=none"
    )


def _refuse_by_rule(hf_config: PretrainedConfig) -> None:
    """Reasons that the config tells by itself."""
    text = hf_config.get_text_config()
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _ISOLATED:
            raise _leak(hf_config, f"layer {index} is of type {kind!r}, which carries a state from token to token")
    for field in ("index_topk", "index_head_dim"):
        if getattr(text, field, None):
            raise _leak(hf_config, f"its sparse indexer ({field}) reads an attention mask that packing does not build")


def _measure(hf_config: PretrainedConfig, attention: str, trust_remote_code: bool) -> tuple[float, str]:
    """On the shrunken copy, else on one that is only shallow. Refuses what its modules give away, and what cannot run."""
    errors = []
    for config in (shrink(hf_config), _shallow(hf_config)):
        try:
            meta = compat.meta_model(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code)
            if sum(p.numel() for p in meta.parameters()) > _MAX_FALLBACK_PARAMS:
                errors.append("too large to measure")
                continue
            _refuse_by_modules(hf_config, meta)
            model = compat.causal_lm(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
            return _packed_against_separate(model, attention)
        except ConfigError:
            raise
        except Exception as error:  # any class of the library may fail in its own way on sizes it never saw
            errors.append(f"{type(error).__name__}: {error}"[:160])
    raise _leak(hf_config, f"no small copy of it could be measured ({'; '.join(errors)})")


def _refuse_by_modules(hf_config: PretrainedConfig, model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = {*module._modules, *module._parameters}
        if state := next((s for s in _STATE if s in own), None):
            raise _leak(hf_config, f"{name} ({type(module).__name__}) has {state}: it mixes neighbouring tokens")
        if isinstance(module, nn.Conv1d):
            raise _leak(hf_config, f"{name} is a convolution over tokens")


def shrink(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The same architecture at hidden size 64: every kind of layer stays, windows fall below the probe's length."""
    small = copy.deepcopy(hf_config)
    text = small.get_text_config()
    heads = _first(text, ("num_attention_heads", "n_head"))
    kv_heads = getattr(text, "num_key_value_heads", None)
    for field, size in _SIZES.items():
        value = getattr(text, field, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            setattr(text, field, size)
    if heads and kv_heads:
        text.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    _cut_layers(text)
    _small_tokens(text)
    return small


def _shallow(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Where the widths depend on each other in ways we do not know: only fewer layers and tokens."""
    small = copy.deepcopy(hf_config)
    text = small.get_text_config()
    _cut_layers(text)
    _small_tokens(text)
    return small


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _small_tokens(text: Any) -> None:
    text.vocab_size = min(text.vocab_size, 128)
    text.pad_token_id, text.bos_token_id, text.eos_token_id = 0, 1, 2


def _cut_layers(text: Any) -> None:
    """Keep a prefix of the layers that holds every kind (dense and MoE, full and sliding), at most 12."""
    depth_name = next((name for name in _DEPTHS if getattr(text, name, None)), None)
    if depth_name is None:
        return
    depth = getattr(text, depth_name)
    lists = {k: v for k, v in vars(text).items() if isinstance(v, (list, tuple)) and len(v) == depth}
    kinds = list(zip(*(map(str, v) for v in lists.values()), strict=True)) or [()] * depth
    keep = max(kinds.index(kind) for kind in set(kinds)) + 1
    first_dense = getattr(text, "first_k_dense_replace", None) or 0
    keep = min(depth, _MAX_DEPTH, max(keep, 2, first_dense + 1 if first_dense < 8 else 2))
    for name, value in lists.items():
        setattr(text, name, value[:keep])
    setattr(text, depth_name, keep)


@torch.no_grad()
def _packed_against_separate(model: Any, attention: str) -> tuple[float, str]:
    """Largest difference relative to the largest hidden value, and the first layer that differs."""
    model.eval()
    ids_T = torch.randint(3, model.config.get_text_config().vocab_size - 1, (sum(_DOCUMENTS),))
    model.set_attn_implementation(attention)
    together, names = _layer_outputs(model, ids_T[None], _DOCUMENTS)
    model.set_attn_implementation("eager")
    apart = [_layer_outputs(model, document[None], (len(document),))[0] for document in ids_T.split(_DOCUMENTS)]
    where, worst = "the model", 0.0
    for index, name in enumerate(names):
        reference = torch.cat([outputs[index] for outputs in apart], 1)
        gap = ((together[index] - reference).abs().max() / reference.abs().max()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
        if worst > _TOLERANCE:
            where = name
            break
    return worst, where


def _layer_outputs(model: Any, ids_BT: Tensor, documents: tuple[int, ...]) -> tuple[list[Tensor], list[str]]:
    """Hidden states after every decoder layer and of the whole, with a name for each."""
    outputs: list[Tensor] = []
    names: list[str] = []
    layers = max(
        (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList()
    )
    handles = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    try:
        hidden = model.base_model(**model_inputs_for(model, ids_BT, documents), use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    names = [f"layer {i} ({type(layer).__name__})" for i, layer in enumerate(layers)]
    if [tuple(o.shape) for o in outputs] != [tuple(hidden.shape)] * len(layers):
        outputs, names = [], []  # layers with outputs of their own kind: only the end can be compared
    return [*outputs, hidden], [*names, f"a layer of {type(model.base_model).__name__}"]
