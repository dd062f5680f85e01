"""How fast an H100 multiplies in bfloat16, as others have measured it: by this a layer chooses between two ways to make
the same gradient, and a dry run grants time. Torch-free.

Shares are of the peak, 989 TFLOP/s, and none above that of large products: a step runs longer than a benchmark, and
hotter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

PEAK = 989e12
BANDWIDTH = 3.35e12
MEMORY = 0.85
"""Of the bandwidth: assumed."""
LAUNCH_SECONDS = 5e-6
"""What a call costs the host: assumed."""

_SINGLE = ((2.1e9, 0.18), (17e9, 0.55), (34e9, 0.69), (120e9, 0.75))
"""One product by its FLOPs. cuBLAS does 177 TFLOP/s on squares of 1024, and on those of 2048 515 (triton issue 2339),
541 and 677; with 34 GFLOP 641 to 728 on four shapes, with 120 and more 726 to 830 (4096 x 7168 x 2048, squares of 4096
and 8192). From github.com/zzc0721/torch-performance-test-data, issue 79 (torch 2.7), and
github.com/waynehacking8/blackwell-tensorcore-kernels, results/bench_sm90a.csv and results/reference/deepgemm.txt, below
"Testing cuBLASLt GEMM" (torch 2.11)."""
_GROUPED = ((512, 0.54), (1024, 0.57), (2048, 0.61), (128_000, 0.71))
"""`torch._grouped_mm` by rows of a group: 525 and 545 TFLOP/s on 16 uneven groups of 8,192 x 5,120 x 8,192 on an H100
(pytorch/ao pull request 2490); 569 and 608 on 32 groups, 6,144 x 2,048, on an H200, whose tensor cores are the same
(pytorch issue 163425, its seconds taken for those of 1,000 calls); 705 on groups of 128,000 (pytorch pull request
156203)."""
_NOT_BESIDE = 0.5
"""Of the shorter one of arithmetic and traffic, where a product adds to a float32 sum: what does not run beside the
other. Fits seven shapes in the last of these files, "TN, FP32, acc=1", within 13%: 7168 x 4096 x 2048 takes 207 us, of
which 162 are arithmetic by the shares above and 82 traffic."""


def single(flops: float) -> float:
    """Share of the peak of a product by itself that has so many FLOPs."""
    return between(_SINGLE, flops)


def grouped(rows: float) -> float:
    """Share of the peak of a grouped product whose groups have so many rows on average."""
    return between(_GROUPED, rows)


def adding(arithmetic: float, traffic: float) -> float:
    """Seconds of a product that adds to a float32 sum, from those of its parts."""
    return max(arithmetic, traffic) + _NOT_BESIDE * min(arithmetic, traffic)


def adds_faster(rows: float, weights: int) -> bool:
    """Whether an expert with so many rows makes its weights' gradient sooner in one product that adds it to a float32
    sum (8 bytes of traffic a weight) than in its share of a grouped one that writes it in bfloat16, which is then read
    and added (10 bytes): by at least what one more call costs the host."""
    flops, traffic = 2.0 * rows * weights, weights / (BANDWIDTH * MEMORY)
    alone = adding(flops / (PEAK * single(flops)), 8 * traffic)
    return alone + LAUNCH_SECONDS < flops / (PEAK * grouped(rows)) + 10 * traffic


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear in the logarithm; the first and the last value outside."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if at < x1:
            return y0 + (y1 - y0) * max(0.0, math.log(at / x0) / math.log(x1 / x0)) if at > 0 else y0
    return points[-1][1]
