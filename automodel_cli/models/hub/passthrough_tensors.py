"""Checkpoint tensors without a counterpart in the model. Copied unchanged into the export.

Examples: multi-token prediction layers, vision towers, rotary tables of old repositories. transformers skips them when
loading and therefore loses them when saving. They keep names, values and dtypes. Quantized ones are written in the
dtype of the export, like all its tensors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import dequantize, source
from automodel_cli.models.hub.lazy_tensor import StoredTensor


def lazy_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return all keys of safetensors files with lazy slices."""
    from safetensors import safe_open

    slices: dict[str, StoredTensor] = {}
    for file in files:
        handle = safe_open(str(file), "pt")
        slices.update({key: handle.get_slice(key) for key in handle.keys()})  # noqa: SIM118  # not a mapping
    return slices


def tensors(config: ModelConfig, keys: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of these keys as stored. Quantized ones are converted to `dtype`."""
    if not keys:
        return
    weights = source.weights(config)
    stored = lazy_tensors(weights.files)
    plain = dequantize.dequantized(stored, weights.quantization)
    for key in keys:
        value: Tensor = plain[key][...]
        yield key, value if plain[key] is stored.get(key) else value.to(dtype)


def copy_files(config: ModelConfig, folder: Path) -> None:
    """Copy all files of the repository except the weights. Remove the quantization from the config."""
    weights = source.weights(config)
    for path in weights.files[0].parent.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".gguf")):
            shutil.copyfile(path, folder / path.name)
    if weights.quantization is not None:
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def passthrough_summary(config: ModelConfig, keys: Sequence[str]) -> str:
    """Return one line for the log: number, size and names of the tensors."""
    stored = lazy_tensors(source.weights(config).files)
    size = sum(_num_bytes(stored, key) for key in keys)
    names = sorted({re.sub(r"^((?:[a-z_]+\.)*?(?:\d+|mtp|visual|vision_\w+))\..*", r"\1.*", key) for key in keys})
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"copied to the export: {len(keys)} tensors without a counterpart in the model, {size / 1e9:.1f} GB: {shown}"


def _num_bytes(stored: Mapping[str, StoredTensor], key: str) -> int:
    if key not in stored:  # a quantized tensor is stored as two tensors
        return sum(_num_bytes(stored, part) for part in (f"{key}_blocks", f"{key}_scales"))
    count = 1
    for length in stored[key].get_shape():
        count *= length
    return count * _WIDTHS.get(stored[key].get_dtype(), 1)


_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
