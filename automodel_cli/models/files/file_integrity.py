"""Integrity checks of model files before a library reads them. Errors name the damaged file. Torch-free."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import override

INDEX = "model.safetensors.index.json"
_JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)
_MAX_HEADER = 100_000_000  # limit of safetensors
_MAX_LAYERS = 10_000
_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


def check_json(folder: str | Path) -> None:
    """Raise ConfigError for a truncated, empty or invalid JSON file of a local folder. Hub ids are not checked."""
    for name in _JSON:
        path = Path(folder) / name
        if path.is_file():
            fields = _read(path)
            if name == "config.json":
                _check_counts(path, fields)


def shards(index: Path) -> list[str]:
    """Return the files that an index names. Raises ConfigError if one is missing."""
    of_tensors = _read(index).get("weight_map")
    given = of_tensors.values() if isinstance(of_tensors, dict) else ()
    names = {name for name in given if isinstance(name, str) and Path(name).name == name}
    if not names or len(names) < len(set(map(str, given))):
        raise _damaged(index, "has no weight_map that maps tensors to files of the folder")
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise _damaged(index, f"names files that are missing: {some}")
    return sorted(names)


def check_weights(files: Sequence[Path]) -> None:
    """Raise ConfigError for a safetensors file with an unreadable header or another size than its header states."""
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(8)
            length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise _damaged(path, f"has {size:,} bytes and an incomplete header")
            try:
                header = json.loads(file.read(length))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
                stated = 8 + length + max(ends, default=0)
            except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
                raise _damaged(path, "has a header that does not describe tensors") from None
        if stated != size:
            raise _damaged(path, f"has {size:,} bytes, but its tensors need {stated:,}")


def check_stops(stop_ids: Sequence[int], vocab_size: int | None, where: str) -> list[int]:
    """Return the stop token ids. Raises ConfigError for an id that is not in the vocabulary."""
    for stop in stop_ids:
        if type(stop) is not int or stop < 0 or stop >= (vocab_size or stop + 1):
            raise ConfigError(
                f"eos_token_id={stop!r} of {where} must be a token id below {vocab_size or 0:,}",
                code="vocabulary_mismatch",
                keys=("pretrained",),
                fix=f"set eos_token_id in generation_config.json and config.json of {where}",
            )
    return list(stop_ids)


def _check_counts(path: Path, fields: dict[str, object]) -> None:
    for part in (part for part in (fields, fields.get("text_config")) if isinstance(part, dict)):
        for name in _COUNTS:
            match part.get(name):
                case str() | float() | bool() | dict() as value:
                    raise _damaged(path, f"has {name}={value!r:.60}, which is not an integer")
                case int(value) if value < 0 or (name == "num_hidden_layers" and value > _MAX_LAYERS):
                    raise _damaged(path, f"has {name}={value:,}")


def _read(path: Path) -> dict[str, object]:
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise _damaged(path, f"contains a {type(fields).__name__} instead of an object")
    return fields


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"the model folder {path.parent} is damaged: {path.name} {problem}",
        code="damaged_file",
        keys=("pretrained",),
        fix=f"copy or download {path.name} again",
    )


def refuse_adapter(folder: Path) -> None:
    """Raise ConfigError for the folder of an adapter (`export/adapter` of a run): no tokenizer, and no model."""
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return
    whole = folder.parent if (folder.parent / "config.json").is_file() else None
    merged = (
        override("model.pretrained", str(whole)) if whole else "merge the adapter into its model, and name that folder"
    )
    raise ConfigError(
        f"model.pretrained={folder} contains only an adapter, without its base model",
        code="wrong_model_kind",
        keys=("pretrained",),
        fix=merged,
    )
