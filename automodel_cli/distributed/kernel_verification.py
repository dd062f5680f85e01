"""Verify Triton kernels of this package on first use, and disable them with a warning if they are wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from automodel_cli.config.warn import warn


def trusted(device_type: str, without: str, difference: Callable[[torch.device], str]) -> bool:
    """Return whether the kernels can be used on this device type. Warns on CUDA if not.

    Args:
        without: begin of the warning.
        difference: runs the kernels and their definition, and returns how they differ. Empty if they agree.
    """
    if device_type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        try:
            reason = difference(torch.device(device_type))
        except Exception as failure:  # Any compiler error.
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        warn("kernel_unavailable", "%s: %s", without, reason)
    return not reason


def beyond(error: float, limit: float) -> str:
    """Return the description of an error above `limit`, or an empty text."""
    return f"they differ from the definition by {error:.1e}" if not error < limit else ""
