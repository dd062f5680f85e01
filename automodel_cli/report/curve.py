"""The loss curve of a run as one SVG, drawn here: no plotting library, no script, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from automodel_cli.report.axes import Point, nice_ticks, padded_range, series, smoothed, step_range, thinned, tick_label

WIDTH = 880
_LEFT, _RIGHT, _TOP = 64, 24, 64
_LOSS_HEIGHT, _NORM_HEIGHT, _GAP, _BOTTOM = 300, 84, 44, 46
_MOST_POINTS = 600
_SMOOTH_FROM = 30  # fewer steps than this are shown as they are

# Attributes carry the light colours (every renderer knows them); the style sheet replaces them on dark pages.
_STYLE = """
.lc-page{fill:#fff}.lc-text{fill:#1f2933}.lc-dim{fill:#616e7c}.lc-grid{stroke:#e4e7eb}.lc-axis{stroke:#9aa5b1}
.lc-raw{stroke:#93c5fd}.lc-train{stroke:#2563eb}.lc-val{stroke:#ea580c}.lc-dot{fill:#ea580c}.lc-norm{stroke:#7c3aed}
@media (prefers-color-scheme:dark){
.lc-page{fill:#12181f}.lc-text{fill:#e6edf3}.lc-dim{fill:#9fb0c0}.lc-grid{stroke:#26313c}.lc-axis{stroke:#52616f}
.lc-raw{stroke:#1e4e8c}.lc-train{stroke:#60a5fa}.lc-val{stroke:#fb923c}.lc-dot{fill:#fb923c}.lc-norm{stroke:#a78bfa}
}"""


@dataclass(frozen=True)
class _Panel:
    """A rectangle with its data range; turns data into pixels."""

    top: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.top + self.height * (1 - (value - low) / (high - low))

    @property
    def bottom(self) -> float:
        return self.top + self.height


def loss_curve_svg(rows: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """Train and validation loss over steps, and the gradient norm in a small panel below, from rows of metrics.jsonl.

    Long runs are averaged to a few hundred points. From 30 steps on the raw loss is pale under its moving average.
    """
    train, val = series(rows, "loss"), series(rows, "val_loss")
    norm = series(rows, "grad_norm")
    height = _TOP + _LOSS_HEIGHT + (_GAP + _NORM_HEIGHT if norm else 0) + _BOTTOM
    parts = [_text(_LEFT, 30, title, "lc-text", size=17, weight=600)]
    if not train and not val:
        parts.append(_text(WIDTH / 2, height / 2, "no step was recorded", "lc-dim", anchor="middle"))
        return _document(height, title, parts)
    x_range = step_range([x for x, _ in train + val + norm])
    loss_panel = _Panel(_TOP, _LOSS_HEIGHT, x_range, padded_range([y for _, y in train + val]))
    parts += _frame(loss_panel, "loss", labels_x=not norm)
    parts += _losses(loss_panel, train, val)
    parts += _legend(train, val)
    if norm:
        panel = _Panel(loss_panel.bottom + _GAP, _NORM_HEIGHT, x_range, (0.0, padded_range([y for _, y in norm])[1]))
        parts += _frame(panel, "gradient norm", labels_x=True, about=3)
        parts.append(_line(panel, thinned(norm, _MOST_POINTS), "lc-norm", 1.4))
    return _document(height, title, parts)


def _losses(panel: _Panel, train: list[Point], val: list[Point]) -> list[str]:
    points = thinned(train, _MOST_POINTS)
    if len(train) >= _SMOOTH_FROM:
        average = thinned(smoothed(train, span=max(5, len(train) // 25)), _MOST_POINTS)
        parts = [_line(panel, points, "lc-raw", 1.0), _line(panel, average, "lc-train", 2.2)]
    else:
        parts = [_line(panel, points, "lc-train", 2.2)]
        parts += [_dot(panel, p, "lc-train", filled=False) for p in points if len(points) == 1]
    parts.append(_line(panel, thinned(val, _MOST_POINTS), "lc-val", 2.0))
    parts += [_dot(panel, point, "lc-dot") for point in val if len(val) <= 60]
    return parts


def _legend(train: list[Point], val: list[Point]) -> list[str]:
    """Entries with the final values, right-aligned in the title's line."""
    entries = []
    if val:
        entries.append((f"validation {val[-1][1]:.4g}", "lc-val"))
    if train:
        entries.append((f"train {train[-1][1]:.4g}", "lc-train"))
    parts, right = [], float(WIDTH - _RIGHT)
    for label, css in entries:
        width = 6.3 * len(label)  # about the width of 12 px sans-serif
        parts.append(_text(right, 48, label, "lc-dim", anchor="end"))
        x = right - width - 8
        parts.append(f'<path class="{css}" d="M{x - 22:.1f} 44H{x:.1f}" {_PAINT[css]} stroke-width="3"/>')
        right = x - 22 - 20
    return parts


def _frame(panel: _Panel, name: str, *, labels_x: bool, about: int = 5) -> list[str]:
    """Grid, axis line and labels of one panel."""
    parts = [_text(_LEFT, panel.top - 10, name, "lc-dim", size=12)]
    y_ticks = nice_ticks(*panel.y_range, about)
    for tick in y_ticks:
        y = panel.y(tick)
        parts.append(f'<path class="lc-grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" {_PAINT["lc-grid"]}/>')
        parts.append(_text(_LEFT - 10, y + 4, tick_label(tick, y_ticks), "lc-dim", anchor="end"))
    parts.append(f'<path class="lc-axis" d="M{_LEFT} {panel.bottom:.1f}H{WIDTH - _RIGHT}" {_PAINT["lc-axis"]}/>')
    x_ticks = [tick for tick in nice_ticks(*panel.x_range, 8) if tick == int(tick)]
    for tick in x_ticks:
        x = panel.x(tick)
        parts.append(f'<path class="lc-axis" d="M{x:.1f} {panel.bottom:.1f}v4" {_PAINT["lc-axis"]}/>')
        if labels_x:
            parts.append(_text(x, panel.bottom + 19, tick_label(tick, x_ticks), "lc-dim", anchor="middle"))
    if labels_x:
        parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, panel.bottom + 38, "step", "lc-dim", anchor="middle"))
    return parts


_PAINT = {
    "lc-page": 'fill="#fff"',
    "lc-text": 'fill="#1f2933"',
    "lc-dim": 'fill="#616e7c"',
    "lc-grid": 'fill="none" stroke="#e4e7eb"',
    "lc-axis": 'fill="none" stroke="#9aa5b1"',
    "lc-raw": 'fill="none" stroke="#93c5fd"',
    "lc-train": 'fill="none" stroke="#2563eb"',
    "lc-val": 'fill="none" stroke="#ea580c"',
    "lc-dot": 'fill="#ea580c"',
    "lc-norm": 'fill="none" stroke="#7c3aed"',
}


def _line(panel: _Panel, points: Sequence[Point], css: str, width: float) -> str:
    if len(points) < 2:
        return ""
    path = "L".join(f"{panel.x(x):.1f} {panel.y(y):.1f}" for x, y in points)
    return f'<path class="{css}" d="M{path}" {_PAINT[css]} stroke-width="{width}" stroke-linejoin="round"/>'


def _dot(panel: _Panel, point: Point, css: str, *, filled: bool = True) -> str:
    radius = 3 if filled else 2.5
    return (
        f'<circle class="{css}" cx="{panel.x(point[0]):.1f}" cy="{panel.y(point[1]):.1f}" r="{radius}" {_PAINT[css]}/>'
    )


def _text(x: float, y: float, text: str, css: str, *, anchor: str = "start", size: int = 12, weight: int = 400) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" {style} {_PAINT[css]}>{escape(text)}</text>'


def _document(height: float, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect class="lc-page" width="{WIDTH}" height="{height}" {_PAINT["lc-page"]}/>\n{body}\n</svg>\n'
    )
