"""A timeline as shapes on a plane: what the SVG and the PNG of a schedule both show. Torch-free."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from automodel_cli.pipelining.timeline.simulator import Span, Timeline

KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_HUES = {"F": 0.585, "B": 0.075, "I": 0.485, "W": 0.37}
_SATURATION = {"F": 0.72, "B": 0.92, "I": 0.62, "W": 0.48}
_INK, _QUIET, _LINE, _IDLE, _PAPER = "#1f2937", "#6b7280", "#e5e7eb", "#f3f4f6", "#ffffff"

ROW, GAP, LEFT, RIGHT, TOP, FOOT = 34, 10, 74, 132, 96, 84
"""Pixels: height of a rank, space between ranks, margins."""


@dataclass(frozen=True)
class Box:
    """A filled rectangle with rounded corners; `tip` explains it where the medium can."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str | None = None
    radius: float = 0.0
    tip: str | None = None


@dataclass(frozen=True)
class Rule:
    """A vertical hairline."""

    x: float
    top: float
    bottom: float
    colour: str


@dataclass(frozen=True)
class Label:
    """One line of text; (x, y) is on its baseline at the anchor."""

    x: float
    y: float
    text: str
    size: float = 12
    colour: str = _INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Box | Rule | Label


@dataclass(frozen=True)
class Picture:
    """Shapes in painting order, in pixels."""

    width: int
    height: int
    shapes: tuple[Shape, ...]


def cell_colour(kind: str, chunk: int, num_chunks: int) -> str:
    """Hue says what the work is, lightness which chunk of the rank: the first is the lightest."""
    depth = 0.5 if num_chunks == 1 else chunk / (num_chunks - 1)
    light = 0.74 - 0.30 * depth
    rgb = colorsys.hls_to_rgb(_HUES[kind], light, _SATURATION[kind])
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def _text_colour(fill: str) -> str:
    r, g, b = (int(fill[k : k + 2], 16) for k in (1, 3, 5))
    return _PAPER if 0.299 * r + 0.587 * g + 0.114 * b < 150 else _INK


def schedule_picture(timeline: Timeline, *, title: str | None = None, unit: str = "") -> Picture:
    """A lane per rank, a box per action with its microbatch; time axis, legend, idle share and activation peak.

    Paired actions share their box: forward above, backward below. `unit` labels the axis ("ms", say); without it the
    unit is that of the costs.
    """
    scale = _pixels_per_unit(timeline)
    width = max(LEFT + timeline.makespan * scale + RIGHT, 760.0)
    bottom = TOP + len(timeline.spans) * (ROW + GAP)
    shapes: list[Shape] = [Box(0, 0, width, bottom + FOOT, _PAPER)]
    shapes += _heading(timeline, title, unit)
    shapes += _axis(timeline, scale, bottom, unit)
    for rank, spans in enumerate(timeline.spans):
        shapes += _lane(timeline, rank, spans, scale)
    shapes += _legend(timeline, bottom + 54)
    return Picture(round(width), bottom + FOOT, tuple(shapes))


def _shortest(timeline: Timeline) -> float:
    return min((s.end - s.start for rank in timeline.spans for s in rank if s.end > s.start), default=1.0)


def _pixels_per_unit(timeline: Timeline) -> float:
    """Wide enough for two digits in the shortest box, within one to two screens."""
    return max(1040 / timeline.makespan, min(20 / _shortest(timeline), 2600 / timeline.makespan))


def _heading(timeline: Timeline, title: str | None, unit: str) -> list[Shape]:
    program = timeline.program
    suffix = f" {unit}" if unit else ""
    facts = [
        f"{program.pp_size} ranks",
        f"{program.num_stages} stages",
        f"{program.num_microbatches} microbatches",
        f"makespan {timeline.makespan:.4g}{suffix}",
        f"idle {timeline.idle_fraction:.1%}",
    ]
    if timeline.efficiency is not None:
        facts.append(f"efficiency {timeline.efficiency:.1%}")
    elif timeline.costs.overlap is not None:
        facts.append(f"pairs take {timeline.costs.overlap:.0%} of their sum")
    return [
        Label(LEFT, 36, title or program.schedule, size=20, bold=True),
        Label(LEFT, 60, "  \N{MIDDLE DOT}  ".join(facts), size=13, colour=_QUIET),
    ]


def _axis(timeline: Timeline, scale: float, bottom: float, unit: str) -> list[Shape]:
    step = _tick(timeline.makespan, timeline.makespan * scale)
    shapes: list[Shape] = []
    for k in range(math.floor(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + k * step * scale
        shapes.append(Rule(x, TOP - 6, bottom - GAP + 6, _LINE))
        shapes.append(Label(x, bottom + 12, f"{k * step:g}", size=11, colour=_QUIET, anchor="middle"))
    end = LEFT + timeline.makespan * scale
    shapes.append(Label(end + 12, bottom + 12, f"time{f' [{unit}]' if unit else ''}", size=11, colour=_QUIET))
    shapes.append(Label(end + 12, TOP - 12, "idle", size=11, colour=_QUIET))
    shapes.append(Label(end + 64, TOP - 12, "peak act.", size=11, colour=_QUIET))
    return shapes


def _tick(span: float, pixels: float) -> float:
    """A round step that puts a label about every 70 pixels."""
    raw = span / max(pixels / 70, 1)
    magnitude = 10 ** math.floor(math.log10(raw))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)


def _lane(timeline: Timeline, rank: int, spans: Sequence[Span], scale: float) -> list[Shape]:
    y = TOP + rank * (ROW + GAP)
    length = timeline.makespan * scale
    base = y + ROW / 2 + 4.5
    idle = timeline.idle_per_rank[rank] / timeline.makespan
    shapes: list[Shape] = [
        Box(LEFT, y, length, ROW, _IDLE, radius=3),
        Label(LEFT - 12, base, f"rank {rank}", size=13, anchor="end"),
        Label(LEFT + length + 12, base, f"{idle:.1%}"),
        Label(LEFT + length + 64, base, f"{timeline.peak_activations[rank]:g}"),
    ]
    size = _label_size(timeline, scale)
    for span in spans:
        if span.end > span.start:
            shapes += _cell(timeline, span, y, scale, size)
    return shapes


def _cell(timeline: Timeline, span: Span, y: float, scale: float, size: float) -> list[Shape]:
    program, action = timeline.program, span.action
    fill = cell_colour(action.kind, program.chunk_of(action.stage), program.num_chunks)
    x, width, height = LEFT + span.start * scale, (span.end - span.start) * scale, float(ROW)
    if span.paired:
        height = ROW / 2
        y += 0 if action.kind == "F" else ROW / 2
    when = f"{span.start:.4g} to {span.end:.4g}"
    tip = f"{KIND_NAMES[action.kind]}, microbatch {action.microbatch}, stage {action.stage}: {when}"
    box = Box(x, y, width, height, fill, stroke=_PAPER, radius=2, tip=tip)
    label = str(action.microbatch)
    if size < 7:  # too dense for all labels: the wide boxes keep theirs
        size = min(11.0, (width - 3) / (0.64 * len(label)))
    size = round(min(size, height * 0.62), 1)
    if size < 7:
        return [box]
    middle = (x + width / 2, y + height / 2 + size * 0.36)
    return [box, Label(*middle, label, size=size, colour=_text_colour(fill), anchor="middle")]


def _label_size(timeline: Timeline, scale: float) -> float:
    """One font size for all boxes: the longest number fits into the narrowest box."""
    digits = len(str(timeline.program.num_microbatches - 1))
    return min(13.0, (_shortest(timeline) * scale - 3) / (0.64 * digits))


def _legend(timeline: Timeline, y: float) -> list[Shape]:
    chunks = timeline.program.num_chunks
    used = [kind for kind in KIND_NAMES if any(s.action.kind == kind for rank in timeline.spans for s in rank)]
    x, shapes = float(LEFT), list[Shape]()
    for kind in used:
        for chunk in range(chunks):
            shapes.append(Box(x, y - 11, 14, 14, cell_colour(kind, chunk, chunks), radius=2))
            x += 16
        shapes.append(Label(x + 4, y, KIND_NAMES[kind]))
        x += 22 + 6.6 * len(KIND_NAMES[kind])
    shapes.append(Box(x, y - 11, 14, 14, _IDLE, stroke=_LINE, radius=2))
    shapes.append(Label(x + 20, y, "idle"))
    note = "number: microbatch" + (f"; shade: chunk 0 (light) to {chunks - 1} (dark)" if chunks > 1 else "")
    shapes.append(Label(x + 64, y, note, colour=_QUIET))
    return shapes
