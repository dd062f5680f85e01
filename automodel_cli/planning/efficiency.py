"""Fitted constants of the dry run, one set per GPU type. Torch-free.

`efficiencies.json` holds them with their provenance. `scripts/calibrate.py` fits them to the published runs of
`scripts/published_runs.yaml` and writes the file. What is counted (FLOPs, bytes, calls, messages) is not in it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "efficiencies.json"


@dataclass(frozen=True)
class Efficiency:
    """Shares of what a data sheet or a benchmark of a single kernel gives, reached over a long run."""

    gemm: float = 1.0
    """Of the rates of single GEMMs in 16 bits: power limit, clock, neighbors."""
    gemm_fp8: float = 1.0
    """Of twice those rates, for GEMMs in 8 bits."""
    grouped: float = 1.0
    """Of the rates of grouped GEMMs."""
    attention: float = 1.0
    """Of the rates of FlashAttention-2 or FlexAttention."""
    memory: float = 0.85
    """Of the memory bandwidth."""
    node: float = 0.70
    """Of the link between GPUs of a machine."""
    network: float = 0.70
    """Of the link to other machines."""
    copy: float = 0.70
    """Of the link to the memory of the machine. Assumed."""
    host: float = 5e-6
    """Seconds of the host per call, with hooks of FSDP2 and autograd."""
    interference: float = 0.0
    """Seconds that kernels lose per second of a collective beside them."""
    low: float = 0.5
    high: float = 2.0
    """Range of (measured / estimated) throughput of runs that the fit did not see."""
    reserved_low: float = 1.0
    reserved_high: float = 1.2
    """Range of bytes that the allocator reserves per byte of tensors."""
    provenance: str = ""
    """What they were fitted to."""


def efficiency(gpu: str) -> Efficiency:
    """Return the constants of a GPU type of `hardware.GPUS`."""
    return _fitted()[gpu]


@functools.cache
def _fitted() -> dict[str, Efficiency]:
    gpus = json.loads(FILE.read_text(encoding="utf-8"))["gpus"]
    return {name: Efficiency(**constants) for name, constants in gpus.items()}
