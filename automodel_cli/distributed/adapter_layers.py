"""Recognize adapters in a model, without importing `peft`."""

from __future__ import annotations

from torch import nn


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of `peft` around a layer, or of trained rows around a table."""
    return hasattr(module, "lora_A")
