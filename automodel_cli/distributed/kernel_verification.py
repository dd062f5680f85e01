"""Verify Triton kernels of this package on first use, and disable them with a warning if they are wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from automodel_cli.config.warn import warn
from automodel_cli.distributed import kernel_report


def trusted(device_type: str, subject: str, difference: Callable[[torch.device], str]) -> bool:
    """Return whether the kernels can be used on this device type. Warns on CUDA if not.

    The line of the subject in the startup summary gives the kernel or the reason.

    Args:
        subject: what the kernels compute.
        difference: runs the kernels and their definition, and returns how they differ. Empty if they agree.
    """
    if device_type != "cuda":
        kernel_report.record(subject, "torch operators (Triton kernels require CUDA)")
        return False
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        try:
            reason = difference(torch.device(device_type))
        except Exception as failure:  # Any compiler error.
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    kernel_report.record(
        subject, f"torch operators ({reason})" if reason else "Triton kernels (agree with the definition)"
    )
    if reason:
        warn("kernel_unavailable", "%s: Triton kernels are not used: %s", subject, reason)
    return not reason


def beyond(error: float, limit: float) -> str:
    """Return the description of an error above `limit`, or an empty text."""
    return f"they differ from the definition by {error:.1e}" if not error < limit else ""
