"""Writes `generation_config.json` of an export: settings of the source, and the stop tokens learned in training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "generation_config.json"


def write_generation_config(folder: Path, config: ModelConfig, model: PreTrainedModel, stop_ids: Sequence[int]) -> None:
    """Write the file of the source with `stop_ids` added to `eos_token_id`. Other fields are unchanged.

    If the source has no file, use the settings that transformers derives from its config.
    """
    fields = _source_fields(config)
    if fields is None:
        fields = _derived_fields(model)
    eos = fields.get("eos_token_id", model.config.get_text_config().eos_token_id)
    source_stops = [i for i in (eos if isinstance(eos, list) else [eos]) if i is not None]
    stops = list(dict.fromkeys([*source_stops, *stop_ids]))
    if stops != source_stops:
        fields["eos_token_id"] = stops[0] if len(stops) == 1 else stops
        fields.pop("_from_model_config", None)  # otherwise transformers derives eos_token_id from the config
    (folder / NAME).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _source_fields(config: ModelConfig) -> dict[str, object] | None:
    """Return the settings of the source unchanged. The class of transformers would drop unknown fields."""
    folder = source.folder(config)
    if folder is None or not (folder / NAME).is_file():
        return None
    fields: dict[str, object] = json.loads((folder / NAME).read_text())
    return fields


def _derived_fields(model: PreTrainedModel) -> dict[str, object]:
    settings = model.generation_config
    if settings is None:
        return {}
    fields: dict[str, object] = json.loads(settings.to_json_string(use_diff=True))
    return fields
