"""Charts of document lengths and of the ranks of a mesh, in the colors of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from automodel_cli.report.drawing import Plane, document, element, text
from automodel_cli.report.sparkline import FRAME

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 170, 50, 10, 10, 34
_MOST_CELLS = 64
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first, as ranks are numbered."""


def histogram_svg(edges: Sequence[float], counts: Sequence[int], *, label: str) -> str:
    """Bars of `counts[i]` from `edges[i]` to `edges[i + 1]`."""
    most = max(counts, default=0)
    if not most or not edges[-1] > edges[0]:
        return ""
    plane = Plane(_LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM, (edges[0], edges[-1]), (0, most))
    parts = plane.frame(FRAME, (6, 3))
    for (begin, end), count in zip(pairwise(edges), counts, strict=True):
        x, y = plane.x(begin), plane.y(count)
        place = {"x": x + 0.5, "y": y, "width": max(1.0, plane.x(end) - x - 1), "height": plane.bottom - y}
        parts.append(element("rect", {"class": "bar", **place}, tip=f"{count:,} of {begin:g} to {end:g}"))
    return document(_WIDTH, _HEIGHT, parts, {"role": "img", "aria-label": label})


def layout_svg(sizes: Mapping[str, int]) -> str:
    """Draw every rank as a numbered cell: a block per stage, a row per data-parallel rank, and within a row the ranks
    that share its data (cp, tp). Large layouts show their first ranks.
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
        parts.append(element("rect", {"class": f"c{stage % 8}", "x": x, "y": y, "width": side, "height": side}))
        parts.append(text(middle, y + 20, str(rank), {"class": "in"}, anchor="middle"))
        if row == column == 0 and pp > 1:
            parts.append(text(x, y - 7, f"pp {stage}", {}))
    return document(_WIDTH, lines * height_of_line + 6, parts, {"role": "img", "aria-label": "ranks of the layout"})


def layout_text(sizes: Mapping[str, int]) -> str:
    """Return a text description of a layout."""
    num_ranks = 1
    for axis in AXES:
        num_ranks *= sizes.get(axis, 1)
    named = [f"{axis} {sizes[axis]}" for axis in (*AXES, "ep") if sizes.get(axis, 1) > 1]
    rows = "Rows read different data; ranks beside each other share it." if num_ranks > 1 else ""
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}: {' x '.join(named)}. {rows}" if named else "One rank."
