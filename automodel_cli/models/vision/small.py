"""Small copies of composites. Sizes of pixels are kept. Widths, depths and the vocabulary are small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.hub import composite_text
from automodel_cli.models.probes.small_sizes import LAYERS, VOCAB
from automodel_cli.models.probes.tiny_model import build_small, shrink

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WIDTH, _DEPTH, _HEADS = 32, 2, 4
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "num_global_layers", "encoder_layers")
_OF_TEXT = ("out_hidden_size", "text_hidden_size", "projector_output_dim", "output_hidden_size", "language_hidden_size")
_WIDTHS = ("hidden_size", "embed_dim", "width", "d_model", "embed_dims")
_INNER = ("intermediate_size", "mlp_dim", "ffn_dim", "encoder_ffn_dim", "alignment_intermediate_size")
_NUM_HEADS = ("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads", "heads")
_PROJECTED = ("projection_dim", "projector_hidden_size", "vision_output_dim", "projector_input_dim")


_copies: dict[tuple[type, str], PreTrainedModel] = {}
"""The last small copy of this process. The probes of a start share it."""


def shared_copy(config: PretrainedConfig) -> PreTrainedModel:
    """Return the small copy of a composite's config, built. Do not change it."""
    key = (type(config), config.to_json_string())
    if key not in _copies:
        built = build_composite(small_composite(config))
        _copies.clear()
        _copies[key] = built
    return _copies[key]


def build_composite(small: PretrainedConfig) -> PreTrainedModel:
    """Build the composite of a small config with noise on every parameter."""
    cls = composite_text.composite_class(small)
    assert cls is not None, "`composite_on_meta` checks it"
    model = build_small(small, lambda config: cls._from_config(config, dtype=torch.float32))
    model.eval()
    return model


def small_composite(config: PretrainedConfig, *, num_layers: int = LAYERS) -> PretrainedConfig:
    """Return a small copy of a composite's config. Sizes of pixels, patches and windows are kept."""
    small = shrink(config, num_layers=num_layers)
    text = small.get_text_config()
    for value in vars(small).values():
        if hasattr(value, "get_text_config") and value is not text:
            _shrink_part(value, text.hidden_size)
    _shrink_part(small, text.hidden_size, nested=False)
    names = [n for n in vars(small) if n.endswith(("_token_id", "_token_index")) and isinstance(getattr(small, n), int)]
    ids = sorted({getattr(small, name) for name in names})
    for name in names:
        setattr(small, name, VOCAB - 1 - ids.index(getattr(small, name)))
    text.pad_token_id = 0
    return small


def _shrink_part(config: PretrainedConfig, text_hidden: int, *, nested: bool = True) -> None:
    canonical = {real: common for common, real in getattr(config, "attribute_map", {}).items()}
    depth = max([_DEPTH, *(len(set(value)) for _, value in _layer_indices(config))]) if nested else _DEPTH
    for name, value in _layer_indices(config) if nested else ():
        count = len(set(value))  # each of these layers keeps a layer of its own
        kept = list(range(depth - count, depth)) if min(value) >= 0 else sorted({max(x, -1) for x in value})
        setattr(config, name, kept)
    for name, value in list(vars(config).items()):
        kind = canonical.get(name, name)
        if name.startswith("_") or value is None:
            continue
        if hasattr(value, "get_text_config"):
            if nested:
                _shrink_part(value, text_hidden)
        elif nested and kind == "hidden_size" and hasattr(config, "embed_dim"):
            setattr(config, name, text_hidden)  # Qwen2-VL: the width of the results beside that of the tower
        elif type(value) is int:
            setattr(config, name, _small_size(kind, value, text_hidden, depth, nested=nested))


def _layer_indices(config: PretrainedConfig) -> list[tuple[str, Sequence[int]]]:
    """Return the fields with indices of layers."""
    fields = [(name, value) for name, value in vars(config).items() if "index" in name and value]
    return [(n, v) for n, v in fields if isinstance(v, list | tuple) and all(isinstance(x, int) for x in v)]


def _small_size(name: str, value: int, text_hidden: int, depth: int, *, nested: bool) -> int:
    sizes = dict.fromkeys(_OF_TEXT, text_hidden) | dict.fromkeys(_INNER, 2 * _WIDTH)
    if nested:
        sizes |= dict.fromkeys(_DEPTHS, min(value, depth)) | dict.fromkeys(_WIDTHS, _WIDTH)
        sizes |= dict.fromkeys(_NUM_HEADS, _HEADS) | dict.fromkeys(_PROJECTED, _WIDTH) | {"head_dim": _WIDTH // _HEADS}
    return sizes.get(name, value)


def placeholder_of(composite_config: PretrainedConfig) -> int:
    """Return the id of the tokens at which features of pictures are inserted. Raises ConfigError."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(getattr(composite_config, name, None), int):
            return int(getattr(composite_config, name))
    raise ConfigError(
        f"pictures are not supported for {composite_config.model_type} because its config names no image token",
        code="not_supported_by_model",
        keys=("model.vision",),
        fix="model.vision=null",
    )
