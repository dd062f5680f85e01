"""Tiny random copies of model configs: the same family and structure with hidden size 64.

Structural measurements on a copy (can it be split into stages? are packed documents isolated?) hold for the model
itself, because they do not depend on sizes. Fields are set by meaning: a rule applies to every config that has the
field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat
from automodel_cli.models.probes.small_sizes import HEAD_DIM, HEADS, HIDDEN, LAYERS, LIMITS, SIZES, VOCAB

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NOISE = 0.05
MAX_PARAMETERS = 10_000_000
SWITCH = 9
"""Length at which tiny copies change behavior (rotary tables, temperatures). Probes have documents on both sides."""

_SHARING = "num_kv_shared_layers"  # number of last layers that use keys and values of earlier layers
_SWITCH = "original_max_position_embeddings"
_LAYER_INDICES = ("hybrid_layer_ids", "full_attn_idxs", "mlp_only_layers")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")


def shrink(config: PretrainedConfig, *, switch: int = SWITCH, num_layers: int = LAYERS) -> PretrainedConfig:
    """Return a tiny copy of `config` with at most `num_layers` layers. The original is not changed.

    Rotary tables switch by length after `switch` tokens.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    fields = {name: value for name, value in vars(text).items() if not name.startswith("_")}
    layers = next((fields[name] for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    keep = _representative(fields, layers, num_layers) if layers and layers > num_layers else None
    overrides = text.to_dict().get("per_layer_config")
    if layers and fields.get(_SHARING) == layers:
        raise ConfigError(
            "it is a draft model, whose layers all use the keys and values of another model",
            code="wrong_model_kind",
            keys=("model",),
        )
    if overrides:
        text.per_layer_config = None  # fields that differ by layer cannot be set while it is present
    canonical = {real: common for common, real in text.attribute_map.items()}
    for name, value in fields.items():
        new = _small_value(canonical.get(name, name), value, fields, keep)
        if new is not value:
            setattr(text, name, new)
    if fields.get(_SHARING) and keep and layers:
        setattr(text, _SHARING, sum(i >= layers - fields[_SHARING] for i in keep))
    if overrides:
        text.per_layer_config = _small_overrides(overrides, fields, keep)
    for holder in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(holder), dict):
            setattr(text, holder, _small_rope(fields[holder], switch))
            if _is_dynamic(fields[holder]):
                text.max_position_embeddings = switch
    if getattr(text, _SWITCH, None):
        setattr(text, _SWITCH, min(fields[_SWITCH], switch))
    for name, value in fields.items():  # configs of other modalities, which some classes build completely
        if hasattr(value, "get_text_config"):
            setattr(text, name, shrink(value, switch=switch, num_layers=2))
    return small


def _small_overrides(
    overrides: dict[str, dict[str, object]], fields: dict[str, object], keep: list[int] | None
) -> dict[int | str, dict[str, object]]:
    """Return the per-layer overrides of the kept layers."""
    return {
        i if keep is None else keep.index(i): {
            name: _small_value(name, value, {**fields, **layer_fields}, None) for name, value in layer_fields.items()
        }
        for i, layer_fields in ((int(index), layer_fields) for index, layer_fields in overrides.items())
        if keep is None or i in keep
    }


def _small_value(name: str, value: Any, fields: dict[str, Any], keep: list[int] | None) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name in LAYER_COUNTS:
        return value if keep is None else min(value, len(keep))
    if isinstance(value, list) and name in (*LIMITS, *SIZES):  # one value per layer
        value = [_small_value(name, entry, fields, None) if isinstance(entry, int) else entry for entry in value]
    if name == "compress_rates":
        return {kind: min(rate, 8) for kind, rate in value.items()}
    if isinstance(value, list) and keep and any(fields.get(count) == len(value) for count in LAYER_COUNTS):
        return [value[i] for i in keep]
    if ("drop" in name or name.endswith("jitter_noise")) and isinstance(value, float):
        return 0.0
    if isinstance(value, list) and keep and name in _LAYER_INDICES:
        return [keep.index(i) for i in value if i in keep]
    if name.endswith("_token_id"):
        return _small_token(name, value)
    if not isinstance(value, int):
        return value
    if name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads"):
        heads = fields.get("num_attention_heads", fields.get("n_head", value))
        return HEADS if value == heads else min(value, 2)
    if name == "num_heads" and "state_size" in fields:  # the heads of the state in Mamba-2
        return fields.get("expand", 2) * HIDDEN // HEAD_DIM
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):
        return SIZES["qk_rope_head_dim"]
    if name == "head_dim" and any(value * part == fields.get("qk_rope_head_dim") for part in _rotary_parts(fields)):
        return SIZES["qk_rope_head_dim"] * value // fields["qk_rope_head_dim"]
    if name == "index_n_heads" and value == fields.get("num_key_value_heads"):  # one selection per group of heads
        return _small_value("num_key_value_heads", value, fields, keep)
    if name in SIZES:
        return SIZES[name] if value > 0 else value
    return min(value, LIMITS[name]) if name in LIMITS else value


def _representative(fields: dict[str, Any], layers: int, num_kept: int) -> list[int]:
    """Return `num_kept` layer indices that cover every kind of layer, twice if possible.

    Some kinds share weights between their layers.
    """
    lists = [v for v in fields.values() if isinstance(v, list) and len(v) == layers]
    if sharing := fields.get(_SHARING):  # every shared kind also needs a layer with its own keys
        lists = [fields["layer_types"], [i >= layers - sharing for i in range(layers)]]
    kinds = [repr([entries[i] for entries in lists]) for i in range(layers)]
    nth = [kinds[:i].count(kinds[i]) for i in range(layers)]
    return sorted(sorted(range(layers), key=lambda i: (min(nth[i], 2), i))[:num_kept])


def _rotary_parts(fields: dict[str, Any]) -> list[float]:
    """Return the rotated fractions of a head for each kind of layer."""
    rope = fields.get("rope_parameters") or {}
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]
    return [table["partial_rotary_factor"] for table in tables if "partial_rotary_factor" in table]


def _small_token(name: str, value: object) -> object:
    index = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 3)
    if isinstance(value, list):
        return [index]
    return index if isinstance(value, int) and value >= VOCAB else value


def _small_rope(rope: dict[str, Any], switch: int) -> dict[str, object]:
    """Cut per-dimension factors (longrope) to the tiny rotary width. May be nested per layer type."""
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    small: dict[str, object] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            small[key] = _small_rope(value, switch)
        elif key in ("short_factor", "long_factor"):
            small[key] = value[:half]
        elif key == _SWITCH:
            small[key] = min(value, switch)
        elif key == "mrope_section":
            rest, third = half - 2 * (half // 3), half // 3  # two of the three axes may have to be equal (Ernie 4.5 VL)
            small[key] = [third, third, rest] if value[0] == value[1] != value[2] else [rest, third, third]
        else:
            small[key] = value
    return small


def _is_dynamic(rope: dict[str, object]) -> bool:
    """Return whether a table grows with texts longer than `max_position_embeddings`. May be nested per layer type."""
    if any(isinstance(value, dict) and _is_dynamic(value) for value in rope.values()):
        return True
    return "dynamic" in str(rope.get("rope_type", rope.get("type", "")))


def build_small(
    config: PretrainedConfig, build: Callable[[PretrainedConfig], PreTrainedModel], seed: int = 0
) -> PreTrainedModel:
    """Build the tiny model in fp32 with noise on every parameter and router bias, so that a lost tensor is detected.

    Uses its own RNG state.
    """
    with torch.random.fork_rng(devices=[]), transformers_compat.quiet():
        with torch.device("meta"):
            size = sum(param.numel() for param in build(copy.deepcopy(config)).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"the tiny copy has {size / 1e6:.0f}M parameters, because some sizes have no rule")
        torch.manual_seed(seed)
        model = build(config).float().train()
        with torch.no_grad():
            tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if "correction_bias" in name)]
            for tensor in tensors:
                tensor.add_(torch.randn_like(tensor) * NOISE)
    return cast("PreTrainedModel", model)
