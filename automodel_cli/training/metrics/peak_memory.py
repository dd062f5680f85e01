"""Peak memory of a run: of the device, or the resident set size of the process on CPU."""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """GiB at the peak so far: memory reserved by torch on an accelerator, peak resident set of the process on CPU.

    Reserved instead of allocated memory, because it decides whether the next allocation fits.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # bytes on macOS, KiB elsewhere


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest `value` of all ranks. Collective. Synchronizes with the device, so call it for log lines
    only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()
