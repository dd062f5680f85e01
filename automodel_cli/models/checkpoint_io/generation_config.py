"""`generation_config.json` of an export: the source's settings, and the stop tokens that training taught."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "generation_config.json"


def write_generation_config(folder: Path, config: ModelConfig, model: PreTrainedModel, stop_ids: Sequence[int]) -> None:
    """Write the source's file with `stop_ids` added to its `eos_token_id`; every other field stays as it is there.

    A source without the file gets what the library derives from its config.
    """
    fields = _source_fields(config)
    if fields is None:
        fields = _derived_fields(model)
    listed = fields.get("eos_token_id", model.config.get_text_config().eos_token_id)
    known = [i for i in (listed if isinstance(listed, list) else [listed]) if i is not None]
    stops = list(dict.fromkeys([*known, *stop_ids]))
    if stops != known:
        fields["eos_token_id"] = stops[0] if len(stops) == 1 else stops
        fields.pop("_from_model_config", None)  # or the library would derive the stops from the config again
    (folder / NAME).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _source_fields(config: ModelConfig) -> dict[str, Any] | None:
    """Return the source's settings as they are written: the library's class would drop what it does not know."""
    folder = source.folder(config)
    if folder is None or not (folder / NAME).is_file():
        return None
    fields: dict[str, Any] = json.loads((folder / NAME).read_text())
    return fields


def _derived_fields(model: PreTrainedModel) -> dict[str, Any]:
    settings = model.generation_config
    if settings is None:
        return {}
    fields: dict[str, Any] = json.loads(settings.to_json_string(use_diff=True))
    return fields
