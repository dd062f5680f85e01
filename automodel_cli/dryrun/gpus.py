"""What a dry run assumes about GPUs and the links between them. Torch-free.

Peaks are those of the vendors' data sheets. The efficiencies are assumptions, the same for every GPU and calibrated on
none: nothing of this project has run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from automodel_cli.training.flops import device_peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """`name` as the driver gives it. `memory_gib` is what torch can allocate; peaks in FLOP/s (dense) and bytes/s."""

    name: str
    memory_gib: float
    peak_fp32: float
    bandwidth: float
    capability: tuple[int, int]
    link: float
    """Bytes/s between GPUs of one machine, one way."""

    @property
    def peak_bf16(self) -> float:
        """The same that MFU is measured against in a run."""
        peak = device_peak_flops(self.name)
        assert peak is not None, f"{self.name} has no peak in training/flops.py"
        return peak


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 79.1, 67e12, 3.35e12, (9, 0), 450e9),
    "h200": Gpu("NVIDIA H200", 139.8, 67e12, 4.8e12, (9, 0), 450e9),
    "b200": Gpu("NVIDIA B200", 178.3, 80e12, 8.0e12, (10, 0), 900e9),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 79.1, 19.5e12, 2.04e12, (8, 0), 300e9),
    "l40s": Gpu("NVIDIA L40S", 44.5, 91.6e12, 0.864e12, (8, 9), 32e9),
}

GEMM, ATTENTION, MEMORY, LINK = 0.70, 0.53, 0.85, 0.70
"""Share of its peak that a matrix product, attention or a grouped product, a copy, and an exchange is granted. The peak
of products of 8-bit floats is twice that of bf16."""
FLEX = 0.45
"""Of attention that torch compiles: 0.85 of the hand-written kernel's, of the blocks that it computes."""
FP32_PRODUCTS = 0.90
KERNEL_SECONDS = 3e-6
"""The shortest kernel."""
LAUNCH_SECONDS = 5e-6
"""What a call costs the host; kernels start when the host has come to them."""
COLLECTIVE_SECONDS = 15e-6


@dataclass(frozen=True)
class Links:
    """How ranks reach each other: `gpus_per_node` neighbours over `node` bytes/s, all others over `network`."""

    node: float
    network: float = 50e9
    gpus_per_node: int = 8

    def seconds(self, kind: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """Of one collective in which this rank's largest tensor has `num_bytes`, by a ring's volume."""
        size = len(ranks)
        if size <= 1:
            return 0.0
        crosses = len({rank // self.gpus_per_node for rank in ranks}) > 1
        bandwidth = (self.network if crosses else self.node) * LINK
        if kind in ("send", "recv"):
            volume = num_bytes
        else:
            volume = num_bytes * (size - 1) / size * (2 if "reduce" in kind and "scatter" not in kind else 1)
        return COLLECTIVE_SECONDS + volume / bandwidth
