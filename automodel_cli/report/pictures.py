"""Drawings of a run that are no curves: lengths of documents, ranks of a layout. For pages, in their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise, product

from automodel_cli.report.axes import nice_ticks, tick_label

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 170, 50, 10, 10, 34
_MOST_CELLS = 64
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first, as ranks are numbered."""


def histogram_svg(edges: Sequence[float], counts: Sequence[int], *, label: str) -> str:
    """Bars of `counts[i]` from `edges[i]` to `edges[i + 1]`."""
    most, low, high = max(counts, default=0), edges[0], edges[-1]
    if not most or not high > low:
        return ""
    floor = _HEIGHT - _BOTTOM
    parts = []
    y_ticks = nice_ticks(0, most, 3)
    for tick in y_ticks:
        y = floor - (floor - _TOP) * tick / most
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick, y_ticks)}</text>')

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    for (begin, end), count in zip(pairwise(edges), counts, strict=True):
        height = (floor - _TOP) * count / most
        place = f'x="{x(begin) + 0.5:.1f}" y="{floor - height:.1f}" width="{max(1.0, x(end) - x(begin) - 1):.1f}"'
        tip = f"{count:,} of {begin:g} to {end:g}"
        parts.append(f'<rect class="bar" {place} height="{height:.1f}"><title>{tip}</title></rect>')
    parts.append(f'<path class="axis" d="M{_LEFT} {floor}H{_WIDTH - _RIGHT}"/>')
    x_ticks = nice_ticks(low, high, 6)
    for tick in x_ticks:
        anchor = "end" if x(tick) > _WIDTH - _RIGHT - 12 else "middle"
        text = tick_label(tick, x_ticks)
        parts.append(f'<text x="{x(tick):.1f}" y="{floor + 18}" text-anchor="{anchor}">{text}</text>')
    return _svg(_WIDTH, _HEIGHT, label, parts)


def layout_svg(sizes: Mapping[str, int]) -> str:
    """Every rank as a cell with its number: a block for each stage, a row for each of the ranks that read different
    rows, and beside each other those that share them (cp, tp). Large layouts show their first ranks.
    """
    pp, dp = sizes.get("pp", 1), sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    across = sizes.get("cp", 1) * sizes.get("tp", 1)
    rows, columns = min(dp, 8), min(across, 8)
    blocks = min(pp, max(1, _MOST_CELLS // (rows * columns)))
    cell, gap, head = 34, 18, 22
    width_of_block = columns * cell + gap
    per_line = max(1, min(blocks, (_WIDTH - gap) // width_of_block))
    lines = -(-blocks // per_line)
    height_of_line = rows * cell + head + gap
    parts = []
    for stage, row, column in product(range(blocks), range(rows), range(columns)):
        x = gap / 2 + stage % per_line * width_of_block + column * cell
        y = head + stage // per_line * height_of_line + row * cell
        rank = (stage * dp + row) * across + column
        side, middle = cell - 3, x + (cell - 3) / 2
        parts.append(f'<rect class="c{stage % 8}" x="{x:.0f}" y="{y:.0f}" width="{side}" height="{side}"/>')
        parts.append(f'<text class="in" x="{middle:.1f}" y="{y + 20:.1f}" text-anchor="middle">{rank}</text>')
        if row == column == 0 and pp > 1:
            parts.append(f'<text x="{x:.0f}" y="{y - 7:.0f}">pp {stage}</text>')
    return _svg(_WIDTH, lines * height_of_line + 6, "ranks of the layout", parts)


def layout_text(sizes: Mapping[str, int]) -> str:
    """What the picture of a layout shows, in words."""
    num_ranks = 1
    for axis in AXES:
        num_ranks *= sizes.get(axis, 1)
    named = [f"{axis} {sizes[axis]}" for axis in (*AXES, "ep") if sizes.get(axis, 1) > 1]
    rows = "Rows read different data; ranks beside each other share it." if num_ranks > 1 else ""
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}: {' x '.join(named)}. {rows}" if named else "One rank."


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
