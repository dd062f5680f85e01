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
    # Example: costs [5, 4, 3, 3, 2, 1] in 2 parts. Rows 0 (5) and 1 (4) open them, row 2 (3) goes to the second (7),
    # row 3 (3) to the first (8), row 4 (2) to the second (9, full), row 5 (1) to the first (9). The result is [0, 3, 5,
    # 1, 2, 4].
    size = len(costs) // num_bins
    parts: list[list[int]] = [[] for _ in range(num_bins)]
    lightest = [(0.0, number) for number in range(num_bins)]
    for row in np.argsort(-costs, kind="stable").tolist():
        load, number = heapq.heappop(lightest)
        parts[number].append(row)
        # A full part leaves the heap. Every part needs the same number of rows, because microbatches have one shape:
        # costs [9, 1, 1, 1] give [0, 3] and [1, 2], with costs 10 and 2.
        if len(parts[number]) < size:
            heapq.heappush(lightest, (load + float(costs[row]), number))
    return np.array([sorted(part) for part in parts], np.int64).reshape(-1)
