"""Time of one kernel: the roofline that `plan` and `dryrun` share. They differ in where FLOPs and bytes come from.

Worked example, a GEMM of 4096 x 7168 x 2048 tokens x columns x rows on an H100: 120 GFLOP at 75% of 989 TFLOP/s are
162 us. Reading and writing 105 MB at 85% of 3.35 TB/s takes 37 us. The kernel takes the larger one, 162 us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.planning import hardware
from automodel_cli.planning.hardware import Gpu


@dataclass(frozen=True)
class Kernel:
    """One operator call, or `number` equal launches of it.

    Attributes:
        kind: its rate in `Efficiency`.
        flops, bytes: of all launches.
        bits: of a factor of a GEMM.
        size: rows per group of a grouped GEMM, tokens per document of attention.
        is_backward: of attention.
        is_compiled: attention that torch compiles (FlexAttention).
        adds: bytes of a float32 sum that a GEMM reads and writes.
    """

    kind: str
    flops: float
    bytes: float
    bits: int = 16
    size: float = 0.0
    is_backward: bool = False
    is_compiled: bool = False
    adds: float = 0.0
    number: int = 1

    def scaled(self, factor: float) -> Kernel:
        """Return a part of the work: a shard of tensor or context parallelism."""
        return replace(self, flops=self.flops * factor, bytes=self.bytes * factor, adds=self.adds * factor)

    def rate(self, gpu: Gpu) -> float:
        """FLOP/s that such a kernel reaches alone."""
        if self.bits >= 32:
            return gpu.peak_fp32 * hardware.FP32_PRODUCTS
        if self.is_compiled:
            return gpu.peak_bf16 * hardware.FLEX
        if self.kind == "attention":
            return gpu.attention(self.size, backward=self.is_backward)
        if self.kind == "grouped":
            share = gemm_timings.grouped(self.size)
            return gpu.peak_bf16 * share * (hardware.GROUPED_IN_8_BITS if self.bits == 8 else 1.0)
        return gpu.peak_bf16 * gemm_timings.single(self.flops / self.number) * (2 if self.bits == 8 else 1)

    def seconds(self, gpu: Gpu) -> tuple[str, float]:
        """Return the slower of arithmetic and memory with its kind, and never less than the shortest kernel.

        A GEMM that adds to a float32 sum does not do all of both at once.
        """
        in_memory = memory_seconds(gpu, self.bytes)
        if not self.flops:
            return "memory", in_memory
        arithmetic = self.flops / (self.rate(gpu) * getattr(gpu.rates, self.kind))
        if self.adds:
            return self.kind, gemm_timings.adding(arithmetic, memory_seconds(gpu, self.adds))
        # Roofline model: compute and memory traffic of a kernel overlap, and the slower one determines its time.
        return (self.kind, arithmetic) if arithmetic > in_memory else ("memory", in_memory)


def memory_seconds(gpu: Gpu, moved: float) -> float:
    """Of a kernel without products."""
    return max(moved / (gpu.bandwidth * gpu.rates.memory), hardware.KERNEL_SECONDS)
