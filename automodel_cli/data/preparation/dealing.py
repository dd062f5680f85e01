"""Deal the rows of a step over ranks and microbatches, so that all of them have about equal work.

All reductions are sums, so which rank computes a row changes nothing but the order of additions.
"""

from __future__ import annotations

import heapq

import numpy as np


def dealt(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Return an order in which consecutive parts of equal size have about equal costs, int64.

    The costliest row goes first, each to the lightest part that has room (Graham's rule for the longest processing
    time). Rows of equal cost keep their order. Within a part, rows keep their order too.

    Args:
        costs: work of each row.
        num_bins: number of parts. It divides the number of rows.
    """
    size = len(costs) // num_bins
    parts: list[list[int]] = [[] for _ in range(num_bins)]
    lightest = [(0.0, number) for number in range(num_bins)]
    for row in np.argsort(-costs, kind="stable").tolist():
        load, number = heapq.heappop(lightest)
        parts[number].append(row)
        if len(parts[number]) < size:
            heapq.heappush(lightest, (load + float(costs[row]), number))
    return np.array([sorted(part) for part in parts], np.int64).reshape(-1)
