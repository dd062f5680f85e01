"""What a checkpoint holds and the model does not build: carried from the original to the export, never dropped.

Layers for multi-token prediction, vision towers, rotary tables of old repositories: the library skips such tensors when
it loads, hence loses them when it saves. They keep their names, values and dtypes; those that are stored quantised are
written plain in the export's dtype, like all others there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import dequantize, source


def lazy_tensors(files: Sequence[Path]) -> dict[str, Any]:
    """Every key of safetensors files and a slice that is not read yet."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in files:
        handle = safe_open(str(file), "pt")
        found.update({key: handle.get_slice(key) for key in handle.keys()})  # noqa: SIM118  # not a mapping
    return found


def tensors(config: ModelConfig, keys: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these keys as they are stored; a quantised one as `dtype`."""
    if not keys:
        return
    weights = source.weights(config)
    stored = lazy_tensors(weights.files)
    plain = dequantize.dequantized(stored, weights.quantization)
    for key in keys:
        value: Tensor = plain[key][...]
        yield key, value if plain[key] is stored.get(key) else value.to(dtype)


def copy_files(config: ModelConfig, folder: Path) -> None:
    """Every file of the repository but its weights; the config without the quantisation that the export has not."""
    weights = source.weights(config)
    for path in weights.files[0].parent.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".gguf")):
            shutil.copyfile(path, folder / path.name)
    if weights.quantization is not None:
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def passthrough_summary(config: ModelConfig, keys: Sequence[str]) -> str:
    """One line, for the log: how many tensors, how large, under which names."""
    stored = lazy_tensors(source.weights(config).files)
    size = sum(_num_bytes(stored, key) for key in keys)
    names = sorted({re.sub(r"^((?:[a-z_]+\.)*?(?:\d+|mtp|visual|vision_\w+))\..*", r"\1.*", key) for key in keys})
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"carried to the export: {len(keys)} tensors, {size / 1e9:.1f} GB, that the model does not build: {shown}"


def _num_bytes(stored: Mapping[str, Any], key: str) -> int:
    if key not in stored:  # joined from the parts that a quantised tensor is stored in
        return sum(_num_bytes(stored, part) for part in (f"{key}_blocks", f"{key}_scales"))
    count = 1
    for length in stored[key].get_shape():
        count *= length
    return count * _WIDTHS.get(stored[key].get_dtype(), 1)


_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
