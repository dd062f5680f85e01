"""Triton kernels of ours on CUDA are trusted where they agree with what defines them, and else left out with a word."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from automodel_cli.config.warn import warn


def trusted(device_type: str, without: str, difference: Callable[[torch.device], str]) -> bool:
    """Whether kernels compute on devices of this type; on CUDA with a sentence if not, which begins with `without`.

    `difference` runs them beside their definition and says how they differ; empty where they agree.
    """
    if device_type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        try:
            reason = difference(torch.device(device_type))
        except Exception as failure:  # whatever a compiler says
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        warn("kernel_unavailable", "%s: %s", without, reason)
    return not reason


def beyond(error: float, limit: float) -> str:
    """What is said of kernels whose largest error is this; empty within the limit."""
    return f"they differ from the definition by {error:.1e}" if not error < limit else ""
