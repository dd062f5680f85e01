"""Longer contexts than a checkpoint was trained for: another scaling of its rotary embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ORIGINAL = "original_max_position_embeddings"
_READS_ORIGINAL = ("yarn", "longrope", "llama3")


def scale_rope(config: ModelConfig, loaded: PretrainedConfig) -> None:
    """Set `model.rope_scaling` in the transformers config of a checkpoint. It is exported with the model.

    The base (`rope_theta`) stays, unless it is given. `max_position_embeddings` becomes `factor` times the original
    length. Raises ConfigError for models without such embeddings, and for values that transformers rejects.
    """
    if config.rope_scaling is None:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text, given = loaded.get_text_config(), config.rope_scaling
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in rope:  # none, or one for each type of layer
        raise ConfigError(
            f"rope_scaling is not supported for {text.model_type}, which does not have one set of rotary embeddings",
            code="not_supported_by_model",
            keys=("rope_scaling",),
            fix="model.rope_scaling=null",
        )
    if given["rope_type"] not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"rope_scaling.rope_type={given['rope_type']!r} must be one of: {', '.join(ROPE_INIT_FUNCTIONS)}",
            code="invalid_choice",
            keys=("rope_scaling",),
            fix="model.rope_scaling.rope_type=yarn",
        )
    original = int(given.get(_ORIGINAL) or rope.get(_ORIGINAL) or text.max_position_embeddings)
    kept: dict[str, object] = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if given["rope_type"] in _READS_ORIGINAL:
        kept[_ORIGINAL] = original
    text.rope_parameters = {**kept, **given}
    text.max_position_embeddings = max(text.max_position_embeddings, round(original * float(given.get("factor", 1))))
    try:
        text.validate_rope()
    except Exception as error:  # KeyError and ValueError of the function of each type
        raise ConfigError(
            f"rope_scaling is rejected by transformers: {error}",
            code="invalid_arguments",
            keys=("rope_scaling",),
            fix="model.rope_scaling='{rope_type: yarn, factor: 4.0}'",
        ) from error
