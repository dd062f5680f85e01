"""One recorded number of one or several runs over steps, as a small SVG that a page shows beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from automodel_cli.report.axes import Point, nice_ticks, padded_range, series, smoothed, step_range, thinned, tick_label

NUM_COLOURS = 8
"""Runs beyond them begin again, dashed."""
WIDTH, HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 12, 34
_MOST_POINTS, _SMOOTH_FROM, _RAW_OF = 400, 30, 3

Rows = Sequence[Mapping[str, Any]]


def panel_svg(runs: Sequence[Rows], key: str, *, label: str, smooth: bool = True) -> str:
    """The column `key` of each run in its colour, `val_KEY` as dots in the same; "" where no run has any.

    With `smooth` it is a moving average from 30 steps on, above the raw values where there are few runs. Colours are
    those of the page (`--c0` to `--c7`).
    """
    trains = [series(rows, key) for rows in runs]
    vals = [series(rows, f"val_{key}") for rows in runs]
    points = [point for one in (*trains, *vals) for point in one]
    if not points:
        return ""
    plane = _Plane(step_range([x for x, _ in points]), padded_range([y for _, y in points]))
    parts = _frame(plane)
    for index, (train, val) in enumerate(zip(trains, vals, strict=True)):
        css = style_of(index)
        if smooth and len(train) >= _SMOOTH_FROM:
            if len(runs) <= _RAW_OF:
                parts.append(_line(plane, thinned(train, _MOST_POINTS), f"raw {css}"))
            train = smoothed(train, span=max(5, len(train) // 25))
        parts.append(_line(plane, thinned(train, _MOST_POINTS), f"line {css}"))
        parts += [_dot(plane, point, css) for point in train if len(train) == 1]
        parts.append(_line(plane, thinned(val, _MOST_POINTS), f"val {css}"))
        parts += [_dot(plane, point, css) for point in val if len(val) <= 60]
    body = "\n".join(part for part in parts if part)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


class _Plane:
    """Data to pixels."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]):
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - (value - low) / (high - low))


def style_of(index: int) -> str:
    """CSS classes of a run by its number on the page."""
    return f"c{index % NUM_COLOURS}" + (" again" if index >= NUM_COLOURS else "")


def _frame(plane: _Plane) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    parts = []
    y_ticks = nice_ticks(*plane.y_range, 4)
    for tick in y_ticks:
        y = plane.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick, y_ticks)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}"/>')
    x_ticks = [tick for tick in nice_ticks(*plane.x_range, 6) if tick == int(tick)]
    for tick in x_ticks:
        x = plane.x(tick)
        anchor = "end" if x > WIDTH - _RIGHT - 12 else "middle"
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{tick_label(tick, x_ticks)}</text>')
    return parts


def _line(plane: _Plane, points: Sequence[Point], css: str) -> str:
    if len(points) < 2:
        return ""
    path = "L".join(f"{plane.x(x):.1f} {plane.y(y):.1f}" for x, y in points)
    return f'<path class="{css}" d="M{path}"/>'


def _dot(plane: _Plane, point: Point, css: str) -> str:
    return f'<circle class="{css}" cx="{plane.x(point[0]):.1f}" cy="{plane.y(point[1]):.1f}" r="3"/>'
