"""SVG elements and axes for all plots, without a plotting library. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal, NamedTuple

from automodel_cli.report.chart_axes import Point, nice_ticks, tick_label

Value = str | float
Style = Mapping[str, Value]
"""Attributes of an element, with their names in SVG."""
Anchor = Literal["start", "middle", "end"]


def element(name: str, attributes: Style, *, text: str = "", tip: str | None = None) -> str:
    """Return one SVG element. Numbers keep two decimals. `tip` is a tooltip."""
    inside = (f"<title>{escape(tip)}</title>" if tip else "") + escape(text)
    written = " ".join(f'{key}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name} {written}>{inside}</{name}>" if inside else f"<{name} {written}/>"


def _value(value: Value) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, content: str, style: Style, *, anchor: Anchor = "start") -> str:
    """Return one line of text with the anchor (x, y) on its baseline."""
    return element("text", {**style, "x": x, "y": y, "text-anchor": anchor}, text=content)


def document(width: float, height: float, parts: Sequence[str], attributes: Style) -> str:
    """Return `parts`, in painting order, as one SVG document of this many pixels. Empty parts are skipped."""
    body = "\n".join(part for part in parts if part)
    head = element("svg", {"viewBox": f"0 0 {width:g} {height:g}", **attributes}).removesuffix("/>")
    return f"{head}>\n{body}\n</svg>"


class FrameStyles(NamedTuple):
    """Attributes of grid lines, of the x axis with its ticks, and of labels."""

    grid: Style
    axis: Style
    label: Style


@dataclass(frozen=True)
class Plane:
    """A rectangle in pixels, and the range of data that it shows."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def line(self, points: Sequence[Point], style: Style) -> str:
        """Return a line through `points`, or "" for fewer than two."""
        if len(points) < 2:
            return ""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        return element("path", {**style, "d": f"M{path}"})

    def dot(self, point: Point, style: Style, radius: float = 3) -> str:
        return element("circle", {**style, "cx": self.x(point[0]), "cy": self.y(point[1]), "r": radius})

    def fitted(self, about: int, character: float = 7) -> Plane:
        """Return the plane with enough space on the left for about `about` labels of the y axis."""
        ticks = nice_ticks(*self.y_range, about)
        longest = max((len(tick_label(tick, ticks)) for tick in ticks), default=0)
        return replace(self, left=max(self.left, 12 + character * longest))

    def frame(self, styles: FrameStyles, about: tuple[int, int], *, labels_x: bool = True) -> list[str]:
        """Return grid lines, an x axis with ticks at whole numbers, and labels, with about so many ticks on x and y."""
        parts, (grid, axis, label) = [], styles
        y_ticks = nice_ticks(*self.y_range, about[1])
        for tick in y_ticks:
            y = self.y(tick)
            parts.append(element("path", {**grid, "d": f"M{self.left:g} {y:.1f}H{self.right:g}"}))
            parts.append(text(self.left - 8, y + 4, tick_label(tick, y_ticks), label, anchor="end"))
        parts.append(element("path", {**axis, "d": f"M{self.left:g} {self.bottom:g}H{self.right:g}"}))
        x_ticks = [tick for tick in nice_ticks(*self.x_range, about[0]) if tick == int(tick)]
        for tick in x_ticks:
            x = self.x(tick)
            parts.append(element("path", {**axis, "d": f"M{x:.1f} {self.bottom:g}v4"}))
            if labels_x:
                anchor: Anchor = "end" if x > self.right - 12 else "middle"
                parts.append(text(x, self.bottom + 18, tick_label(tick, x_ticks), label, anchor=anchor))
        return parts
