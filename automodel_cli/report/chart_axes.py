"""Ticks, number labels and point reduction for drawings. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Point = tuple[float, float]
Rows = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl."""


def series(rows: Rows, key: str) -> list[Point]:
    """(step, value) of the rows of metrics.jsonl that have a finite value."""
    return [
        (float(row["step"]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
    ]


def step_range(steps: Sequence[float]) -> tuple[float, float]:
    """Return the range of the x axis: from 0 if the steps begin near it, and never empty."""
    low, high = min(steps), max(steps)
    return (0.0 if low <= max(1.0, 0.05 * high) else low, high) if high > low else (low - 1, high + 1)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `number` round values (1, 2 or 5 times a power of ten apart) in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def tick_label(value: float, ticks: Sequence[float]) -> str:
    """Format `value` with the decimals that neighboring ticks need: 0.5 among 0.5 steps, 20k, 5e-05."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if max(map(abs, ticks)) < 1e-3:
        return f"{value:.3g}"
    gap = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    return f"{value:.{min(decimals, 6)}f}"


def padded_range(values: Sequence[float], pad: float = 0.06) -> tuple[float, float]:
    """Return the range of `values` with a margin. Never empty, and not below zero if all values are positive.

    Values that differ by less than 0.1% are drawn as a constant: 1.0000003 to 1.0000012 gives 0.9 to 1.1.
    """
    low, high = min(values), max(values)
    margin = (high - low) * pad
    if high - low <= 1e-3 * max(abs(low), abs(high)):
        margin = abs(high) * 0.1 or 0.1
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: neighbours are averaged, so that a long run's picture stays small and shows every part."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smoothed(points: Sequence[Point], span: int) -> list[Point]:
    """Return a centered moving average over about `span` values, fewer at both ends. Centered, so it does not lag."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result = []
    for index, (x, _) in enumerate(points):
        reach = min(span // 2, index, len(points) - 1 - index)
        low, high = index - reach, index + reach + 1
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result
