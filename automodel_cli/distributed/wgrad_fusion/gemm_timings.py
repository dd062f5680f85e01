"""GEMM throughput of an H100 in bfloat16, from published measurements. Torch-free.

Selects between two ways to compute a weight gradient, and estimates the time of a dry run.

Rates are fractions of the peak, 989 TFLOP/s. They are capped at the rate of large GEMMs, because a training step runs
longer and hotter than a benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

PEAK = 989e12
BANDWIDTH = 3.35e12
MEMORY = 0.85
"""Assumed fraction of the memory bandwidth."""
LAUNCH_SECONDS = 5e-6
"""Assumed host time of one kernel launch."""

_SINGLE = ((2.1e9, 0.18), (17e9, 0.55), (34e9, 0.69), (120e9, 0.75))
"""(FLOPs of a single GEMM, fraction of the peak).

cuBLAS reaches 177 TFLOP/s on squares of 1024, and 515 (triton issue 2339), 541 and 677 on squares of 2048. It reaches
641 to 728 on four shapes with 34 GFLOP, and 726 to 830 with 120 GFLOP or more (4096 x 7168 x 2048, squares of 4096 and
8192). Sources: github.com/zzc0721/torch-performance-test-data, issue 79 (torch 2.7), and
github.com/waynehacking8/blackwell-tensorcore-kernels, results/bench_sm90a.csv and results/reference/deepgemm.txt, below
"Testing cuBLASLt GEMM" (torch 2.11).
"""
_GROUPED = ((512, 0.54), (1024, 0.57), (2048, 0.61), (128_000, 0.71))
"""(rows per group of `torch._grouped_mm`, fraction of the peak).

525 and 545 TFLOP/s on 16 uneven groups of 8,192 x 5,120 x 8,192 on an H100 (pytorch/ao pull request 2490). 569 and 608
on 32 groups, 6,144 x 2,048, on an H200, which has the same tensor cores (pytorch issue 163425, assuming that its
seconds are for 1,000 calls). 705 on groups of 128,000 (pytorch pull request 156203).
"""
_NOT_BESIDE = 0.5
"""Fraction of the shorter one of compute and memory time that does not overlap if a GEMM adds to a float32 sum.

Fits seven shapes of the last file, "TN, FP32, acc=1", within 13%. For example, 7168 x 4096 x 2048 takes 207 us, with
162 us of compute by the rates above and 82 us of memory traffic.
"""


def single(flops: float) -> float:
    """Return the fraction of the peak that a single GEMM reaches."""
    return between(_SINGLE, flops)


def grouped(rows: float) -> float:
    """Return the fraction of the peak that a grouped GEMM reaches with so many rows per group on average."""
    return between(_GROUPED, rows)


def adding(arithmetic: float, traffic: float) -> float:
    """Return the seconds of a GEMM that adds to a float32 sum, from its compute and memory seconds."""
    return max(arithmetic, traffic) + _NOT_BESIDE * min(arithmetic, traffic)


def adds_faster(rows: float, weights: int) -> bool:
    """Return whether one GEMM per expert that accumulates in float32 is faster than a grouped GEMM plus an addition.

    The accumulating GEMM reads and writes 8 bytes per weight. The grouped GEMM writes a bfloat16 gradient that is then
    read and added, 10 bytes per weight. The difference must exceed one kernel launch.

    Args:
        rows: average rows per expert.
        weights: elements of the weight of one expert.
    """
    # Example: experts of 2,048 x 1,536. With 1,024 rows per expert the grouped GEMM is faster, with 4,096 the
    # accumulating one: single GEMMs reach their rate only if they are large.
    flops, traffic = 2.0 * rows * weights, weights / (BANDWIDTH * MEMORY)
    alone = adding(flops / (PEAK * single(flops)), 8 * traffic)
    return alone + LAUNCH_SECONDS < flops / (PEAK * grouped(rows)) + 10 * traffic


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate linearly in the logarithm of x. Constant outside the given points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if at < x1:
            return y0 + (y1 - y0) * max(0.0, math.log(at / x0) / math.log(x1 / x0)) if at > 0 else y0
    return points[-1][1]
