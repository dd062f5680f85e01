"""Loss curve of a run as an SVG for light and dark pages, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.report.chart_axes import Point, Rows, padded_range, series, smoothed, step_range, thinned
from automodel_cli.report.drawing import Anchor, FrameStyles, Plane, Style, document, element, text

WIDTH = 880
_LEFT, _RIGHT, _TOP = 64, 24, 64
_LOSS_HEIGHT, _NORM_HEIGHT, _GAP, _BOTTOM = 300, 84, 44, 46
_MOST_POINTS = 600
_SMOOTH_FROM = 30  # fewer steps than this are shown as they are

# Attributes carry the light colors (every renderer supports them). The style sheet replaces them on dark pages.
_STYLE = """
.lc-page{fill:#fff}.lc-text{fill:#1f2933}.lc-dim{fill:#616e7c}.lc-grid{stroke:#e4e7eb}.lc-axis{stroke:#9aa5b1}
.lc-raw{stroke:#93c5fd}.lc-train{stroke:#2563eb}.lc-val{stroke:#ea580c}.lc-dot{fill:#ea580c}.lc-norm{stroke:#7c3aed}
@media (prefers-color-scheme:dark){
.lc-page{fill:#12181f}.lc-text{fill:#e6edf3}.lc-dim{fill:#9fb0c0}.lc-grid{stroke:#26313c}.lc-axis{stroke:#52616f}
.lc-raw{stroke:#1e4e8c}.lc-train{stroke:#60a5fa}.lc-val{stroke:#fb923c}.lc-dot{fill:#fb923c}.lc-norm{stroke:#a78bfa}
}"""


_PAINT: dict[str, Style] = {
    name: {"class": name, **{key: value for key, value in (("fill", fill), ("stroke", stroke)) if value}}
    for name, fill, stroke in (
        ("lc-page", "#fff", ""),
        ("lc-text", "#1f2933", ""),
        ("lc-dim", "#616e7c", ""),
        ("lc-grid", "none", "#e4e7eb"),
        ("lc-axis", "none", "#9aa5b1"),
        ("lc-raw", "none", "#93c5fd"),
        ("lc-train", "none", "#2563eb"),
        ("lc-val", "none", "#ea580c"),
        ("lc-dot", "#ea580c", ""),
        ("lc-norm", "none", "#7c3aed"),
    )
}


def loss_curve_svg(rows: Rows, *, title: str) -> str:
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
    loss_plane = _plane(_TOP, _LOSS_HEIGHT, x_range, padded_range([y for _, y in train + val]))
    parts += _frame(loss_plane, "loss", labels_x=not norm)
    parts += _losses(loss_plane, train, val)
    parts += _legend(train, val)
    if norm:
        plane = _plane(loss_plane.bottom + _GAP, _NORM_HEIGHT, x_range, (0.0, padded_range([y for _, y in norm])[1]))
        parts += _frame(plane, "gradient norm", labels_x=True, about=3)
        parts.append(_line(plane, thinned(norm, _MOST_POINTS), "lc-norm", 1.4))
    return _document(height, title, parts)


def _plane(top: float, height: float, x_range: tuple[float, float], y_range: tuple[float, float]) -> Plane:
    return Plane(_LEFT, WIDTH - _RIGHT, top, top + height, x_range, y_range)


def _losses(plane: Plane, train: list[Point], val: list[Point]) -> list[str]:
    points = thinned(train, _MOST_POINTS)
    if len(train) >= _SMOOTH_FROM:
        average = thinned(smoothed(train, span=max(5, len(train) // 25)), _MOST_POINTS)
        parts = [_line(plane, points, "lc-raw", 1.0), _line(plane, average, "lc-train", 2.2)]
    else:
        parts = [_line(plane, points, "lc-train", 2.2)]
        parts += [plane.dot(p, _PAINT["lc-train"], 2.5) for p in points if len(points) == 1]
    parts.append(_line(plane, thinned(val, _MOST_POINTS), "lc-val", 2.0))
    parts += [plane.dot(point, _PAINT["lc-dot"]) for point in val if len(val) <= 60]
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
        parts.append(element("path", {**_PAINT[css], "d": f"M{x - 22:.1f} 44H{x:.1f}", "stroke-width": 3}))
        right = x - 22 - 20
    return parts


def _frame(plane: Plane, name: str, *, labels_x: bool, about: int = 5) -> list[str]:
    """Grid, axis line and labels of one plane."""
    styles = FrameStyles(_PAINT["lc-grid"], _PAINT["lc-axis"], {**_PAINT["lc-dim"], "font-size": 12})
    parts = [_text(_LEFT, plane.top - 10, name, "lc-dim")]
    parts += plane.frame(styles, (8, about), labels_x=labels_x)
    if labels_x:
        parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, plane.bottom + 38, "step", "lc-dim", anchor="middle"))
    return parts


def _line(plane: Plane, points: Sequence[Point], css: str, width: float) -> str:
    return plane.line(points, {**_PAINT[css], "stroke-width": width, "stroke-linejoin": "round"})


def _text(
    x: float, y: float, content: str, css: str, *, anchor: Anchor = "start", size: int = 12, weight: int = 400
) -> str:
    return text(x, y, content, {**_PAINT[css], "font-size": size, "font-weight": weight}, anchor=anchor)


def _document(height: float, title: str, parts: Sequence[str]) -> str:
    page = element("rect", {**_PAINT["lc-page"], "width": WIDTH, "height": height})
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "role": "img",
        "aria-label": title,
        "font-family": "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
    }
    return document(WIDTH, height, [f"<style>{_STYLE}</style>", page, *parts], attributes) + "\n"
