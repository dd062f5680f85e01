"""Classify errors of a trace: errors of the step, which would occur on a GPU too, or bugs of the dry run.

The dry run replaces devices, streams, kernels and process groups. An error that these replacements cause says nothing
about the run.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import CodeType, TracebackType

from automodel_cli.dryrun.fake_device.torch_compat import LIMITS_OF_FAKES, is_of_cuda_build

_HERE = str(Path(__file__).parent)
_PASSES_ON = "__torch_dispatch__"
"""The frame of ours below which every operator of the step runs."""
_NEEDS_A_DEVICE = (
    "Found no NVIDIA driver", "No CUDA GPUs are available", "not compiled with CUDA",
    "not linked with support for cuda", "hasPrimaryContext", "accelerator device when none is available", "CUDA driver",
    "'Meta' backend", "Cannot copy out of meta tensor", "CUDA error",
    "is on the meta device",
)  # fmt: skip
"""Words of torch's C++ errors, which have no class of their own."""


def described(error: Exception) -> dict[str, object]:
    """What a worker answers for a trace that raised: message, frames outside of torch, and whose fault it is."""
    while isinstance(error.__cause__, Exception):  # pipelines wrap what stages raise
        error = error.__cause__
    first = (str(error).splitlines() or [""])[0]
    frames = "".join(f for f in traceback.format_tb(error.__traceback__) if "site-packages/torch/" not in f)
    return {"message": f"{type(error).__name__}: {first}", "trace": frames, "ours": is_ours(error)}


def is_ours(error: BaseException) -> bool:
    """Whether a stand-in of the dry run caused `error`: it raised it, lacks a name that was asked of it, or let a call
    through to a device that is not there."""
    if isinstance(error, LIMITS_OF_FAKES):
        return True
    match error:
        case AttributeError() if _is_stand_in(error.obj) or is_of_cuda_build(str(error.name)):
            return True
        case RuntimeError() | AssertionError() if any(word in str(error) for word in _NEEDS_A_DEVICE):
            return True
    code = _innermost(error.__traceback__)
    return code is not None and code.co_filename.startswith(_HERE) and code.co_name != _PASSES_ON


def _is_stand_in(thing: object) -> bool:
    """For the `obj` of an AttributeError."""
    kind: type = thing if isinstance(thing, type) else type(thing)
    return kind.__module__.startswith(f"{__package__}.")


def _innermost(trace: TracebackType | None) -> CodeType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_code
