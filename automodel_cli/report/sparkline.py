"""Small SVG plot of one metric of one or several runs over steps."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.report.chart_axes import Rows, padded_range, series, smoothed, step_range, thinned
from automodel_cli.report.drawing import FrameStyles, Plane, document

NUM_COLOURS = 8
"""Runs beyond them begin again, dashed."""
WIDTH, HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 12, 34
_MOST_POINTS, _SMOOTH_FROM, _RAW_OF = 400, 30, 3
FRAME = FrameStyles({"class": "grid"}, {"class": "axis"}, {})
"""Classes of the page's style sheet."""


def panel_svg(runs: Sequence[Rows], key: str, *, label: str, smooth: bool = True) -> str:
    """Draw the column `key` of each run in its color, and `val_KEY` as dots. "" if no run has either.

    With `smooth`, 30 or more steps are drawn as a moving average, above the raw values if there are few runs. Colors
    are those of the page (`--c0` to `--c7`).
    """
    trains = [series(rows, key) for rows in runs]
    vals = [series(rows, f"val_{key}") for rows in runs]
    points = [point for one in (*trains, *vals) for point in one]
    if not points:
        return ""
    ranges = step_range([x for x, _ in points]), padded_range([y for _, y in points])
    plane = Plane(_LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM, *ranges).fitted(4)
    parts = plane.frame(FRAME, (6, 4))
    for index, (train, val) in enumerate(zip(trains, vals, strict=True)):
        css = style_of(index)
        if smooth and len(train) >= _SMOOTH_FROM:
            if len(runs) <= _RAW_OF:
                parts.append(plane.line(thinned(train, _MOST_POINTS), {"class": f"raw {css}"}))
            train = smoothed(train, span=max(5, len(train) // 25))
        parts.append(plane.line(thinned(train, _MOST_POINTS), {"class": f"line {css}"}))
        parts += [plane.dot(point, {"class": css}) for point in train if len(train) == 1]
        parts.append(plane.line(thinned(val, _MOST_POINTS), {"class": f"val {css}"}))
        parts += [plane.dot(point, {"class": css}) for point in val if len(val) <= 60]
    return document(WIDTH, HEIGHT, parts, {"role": "img", "aria-label": label})


def style_of(index: int) -> str:
    """CSS classes of a run by its number on the page."""
    return f"c{index % NUM_COLOURS}" + (" again" if index >= NUM_COLOURS else "")
