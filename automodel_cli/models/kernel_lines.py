"""Lines of the startup summary about attention and recurrent layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models.attention import kernel_selection
from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.document_masking import recurrent_layers

if TYPE_CHECKING:
    from automodel_cli.models.config import ModelConfig

_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages with kernels for recurrent layers. transformers falls back to torch operators without them."""


def attention_lines(config: ModelConfig, parts: Sequence[nn.Module]) -> list[tuple[str, str]]:
    """Return (subject, text): how attention runs, and recurrent layers if the parts contain any."""
    modules = [module for part in parts for module in part.modules()]
    layers = {type(layer).__name__ for part in parts for _, layer in modules_of(part, recurrent_layers.StateLayer)}
    kind = config.attn_implementation
    if any(recurrent_layers.runs_by_document(module) for module in modules):
        return [("attention", f"{kind}, one document after another (packed attention cannot compute this family)")]
    kernel = str(kernel_selection.chosen_kernel()) if kind == PACKED else f"{kind} of transformers"
    lines = [("attention", kernel)]
    if layers:
        lines.append(("recurrent", f"{', '.join(sorted(layers))}, one document after another; {recurrent_kernels()}"))
    return lines


def recurrent_kernels() -> str:
    """Return which packages with kernels for recurrent layers are installed, and what runs without them."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    found = [name for name in _PACKAGES if name not in missing]
    without = f"torch operators ({', '.join(missing)}: not installed)" if missing else ""
    return "; ".join(filter(None, [f"kernels of {', '.join(found)}" if found else "", without]))
