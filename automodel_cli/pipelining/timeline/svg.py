"""Draw a timeline as SVG, or as plain text for the terminal. Torch-free, without dependencies."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

from automodel_cli.pipelining.timeline.simulator import Span, Timeline
from automodel_cli.report.drawing import Anchor, Value, document, element, text

KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_HUES = {"F": 0.585, "B": 0.075, "I": 0.485, "W": 0.37}
_SATURATION = {"F": 0.72, "B": 0.92, "I": 0.62, "W": 0.48}
_INK, _QUIET, _LINE, _IDLE, _PAPER = "#1f2937", "#6b7280", "#e5e7eb", "#f3f4f6", "#ffffff"

ROW, GAP, LEFT, RIGHT, TOP, FOOT = 34, 10, 74, 132, 96, 84
"""Pixels: height of a rank, space between ranks, margins."""


def _box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str = "", radius: float = 0, tip: str = ""
) -> str:
    place: dict[str, Value] = {"x": x, "y": y, "width": width, "height": height, "rx": radius, "fill": fill}
    return element("rect", {**place, **({"stroke": stroke} if stroke else {})}, tip=tip)


def _line(
    x: float,
    y: float,
    content: str,
    *,
    size: float = 12,
    colour: str = _INK,
    anchor: Anchor = "start",
    weight: int = 400,
) -> str:
    return text(x, y, content, {"font-size": size, "fill": colour, "font-weight": weight}, anchor=anchor)


def cell_colour(kind: str, chunk: int, num_chunks: int) -> str:
    """Return a color: the hue is the kind of work, the lightness the chunk of the rank, from light to dark."""
    depth = 0.5 if num_chunks == 1 else chunk / (num_chunks - 1)
    light = 0.74 - 0.30 * depth
    rgb = colorsys.hls_to_rgb(_HUES[kind], light, _SATURATION[kind])
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def _text_colour(fill: str) -> str:
    r, g, b = (int(fill[k : k + 2], 16) for k in (1, 3, 5))
    return _PAPER if 0.299 * r + 0.587 * g + 0.114 * b < 150 else _INK


def draw_svg(timeline: Timeline, *, title: str | None = None, unit: str = "") -> str:
    """Draw a lane per rank and a box per action, with time axis, legend, idle fraction and activation peak.

    Paired actions share a box, forward above and backward below.

    Args:
        unit: label of the axis, for example "ms". Defaults to the unit of the costs.
    """
    scale = _pixels_per_unit(timeline)
    width = max(LEFT + timeline.makespan * scale + RIGHT, 760.0)
    bottom = TOP + len(timeline.spans) * (ROW + GAP)
    parts: list[str] = [_box(0, 0, width, bottom + FOOT, _PAPER)]
    parts += _heading(timeline, title, unit)
    parts += _axis(timeline, scale, bottom, unit)
    for rank, spans in enumerate(timeline.spans):
        parts += _lane(timeline, rank, spans, scale)
    parts += _legend(timeline, bottom + 54)
    attributes: dict[str, Value] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "width": round(width),
        "height": bottom + FOOT,
    }
    return document(
        round(width), bottom + FOOT, parts, {**attributes, "font-family": "Inter, Helvetica, Arial, sans-serif"}
    )


def _shortest(timeline: Timeline) -> float:
    return min((s.end - s.start for rank in timeline.spans for s in rank if s.end > s.start), default=1.0)


def _pixels_per_unit(timeline: Timeline) -> float:
    """Return a scale with space for two digits in the shortest box, and a width of one to two screens."""
    return max(1040 / timeline.makespan, min(20 / _shortest(timeline), 2600 / timeline.makespan))


def _heading(timeline: Timeline, title: str | None, unit: str) -> list[str]:
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
        _line(LEFT, 36, title or program.schedule, size=20, weight=600),
        _line(LEFT, 60, "  \N{MIDDLE DOT}  ".join(facts), size=13, colour=_QUIET),
    ]


def _axis(timeline: Timeline, scale: float, bottom: float, unit: str) -> list[str]:
    step = _tick(timeline.makespan, timeline.makespan * scale)
    parts: list[str] = []
    for k in range(math.floor(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + k * step * scale
        parts.append(element("line", {"x1": x, "y1": TOP - 6, "x2": x, "y2": bottom - GAP + 6, "stroke": _LINE}))
        parts.append(_line(x, bottom + 12, f"{k * step:g}", size=11, colour=_QUIET, anchor="middle"))
    end = LEFT + timeline.makespan * scale
    parts.append(_line(end + 12, bottom + 12, f"time{f' [{unit}]' if unit else ''}", size=11, colour=_QUIET))
    parts.append(_line(end + 12, TOP - 12, "idle", size=11, colour=_QUIET))
    parts.append(_line(end + 64, TOP - 12, "peak act.", size=11, colour=_QUIET))
    return parts


def _tick(span: float, pixels: float) -> float:
    """Return a round step with a label about every 70 pixels."""
    raw = span / max(pixels / 70, 1)
    magnitude = 10 ** math.floor(math.log10(raw))
    step: float = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    return step


def _lane(timeline: Timeline, rank: int, spans: Sequence[Span], scale: float) -> list[str]:
    y = TOP + rank * (ROW + GAP)
    length = timeline.makespan * scale
    base = y + ROW / 2 + 4.5
    idle = timeline.idle_per_rank[rank] / timeline.makespan
    parts: list[str] = [
        _box(LEFT, y, length, ROW, _IDLE, radius=3),
        _line(LEFT - 12, base, f"rank {rank}", size=13, anchor="end"),
        _line(LEFT + length + 12, base, f"{idle:.1%}"),
        _line(LEFT + length + 64, base, f"{timeline.peak_activations[rank]:g}"),
    ]
    size = _label_size(timeline, scale)
    for span in spans:
        if span.end > span.start:
            parts += _cell(timeline, span, y, scale, size)
    return parts


def _cell(timeline: Timeline, span: Span, y: float, scale: float, size: float) -> list[str]:
    program, action = timeline.program, span.action
    fill = cell_colour(action.kind, program.chunk_of(action.stage), program.num_chunks)
    x, width, height = LEFT + span.start * scale, (span.end - span.start) * scale, float(ROW)
    if span.paired:
        height = ROW / 2
        y += 0 if action.kind == "F" else ROW / 2
    when = f"{span.start:.4g} to {span.end:.4g}"
    tip = f"{KIND_NAMES[action.kind]}, microbatch {action.microbatch}, stage {action.stage}: {when}"
    box = _box(x, y, width, height, fill, stroke=_PAPER, radius=2, tip=tip)
    label = str(action.microbatch)
    if size < 7:  # Too dense for all labels. Wide boxes keep theirs.
        size = min(11.0, (width - 3) / (0.64 * len(label)))
    size = round(min(size, height * 0.62), 1)
    if size < 7:
        return [box]
    middle = (x + width / 2, y + height / 2 + size * 0.36)
    return [box, _line(*middle, label, size=size, colour=_text_colour(fill), anchor="middle")]


def _label_size(timeline: Timeline, scale: float) -> float:
    """Return one font size for all boxes: the longest number fits into the narrowest box."""
    digits = len(str(timeline.program.num_microbatches - 1))
    return min(13.0, (_shortest(timeline) * scale - 3) / (0.64 * digits))


def _legend(timeline: Timeline, y: float) -> list[str]:
    chunks = timeline.program.num_chunks
    used = [kind for kind in KIND_NAMES if any(s.action.kind == kind for rank in timeline.spans for s in rank)]
    x, parts = float(LEFT), list[str]()
    for kind in used:
        for chunk in range(chunks):
            parts.append(_box(x, y - 11, 14, 14, cell_colour(kind, chunk, chunks), radius=2))
            x += 16
        parts.append(_line(x + 4, y, KIND_NAMES[kind]))
        x += 22 + 6.6 * len(KIND_NAMES[kind])
    parts.append(_box(x, y - 11, 14, 14, _IDLE, stroke=_LINE, radius=2))
    parts.append(_line(x + 20, y, "idle"))
    note = "number: microbatch" + (f"; shade: chunk 0 (light) to {chunks - 1} (dark)" if chunks > 1 else "")
    parts.append(_line(x + 64, y, note, colour=_QUIET))
    return parts


def draw_text(timeline: Timeline, *, width: int = 120, ascii_only: bool = False, unit: str = "") -> str:
    """Draw the timeline as text: a line per rank with boxes `F0`, `B0`, ... and `width` columns.

    Letters are the kind (F forward, B backward, I input gradients, W weight gradients), numbers the microbatch.
    Capitals are chunk 0 of the rank, small letters later chunks. A box that is too narrow for its number shows the
    letter only.
    """
    idle, mark = (".", "|") if ascii_only else ("·", "▏")
    head = f"rank {len(timeline.spans) - 1} "
    columns = _columns(timeline, max(20, width - len(head)))
    per_unit = columns / timeline.makespan
    lines = []
    for rank, spans in enumerate(timeline.spans):
        line = [idle] * columns
        for span in spans:
            start, end = round(span.start * per_unit), round(span.end * per_unit)
            if span.paired and span.action.kind != "F":
                start = (start + end) // 2
            elif span.paired:
                end = (start + end) // 2
            line[start:end] = _label(timeline, span, end - start, mark)
        lines.append(f"{f'rank {rank} ':>{len(head)}}{''.join(line[:columns])}")
    share = f"idle {timeline.idle_fraction:.1%}, makespan {timeline.makespan:.4g}{f' {unit}' if unit else ''}"
    peaks = ", ".join(f"{p:g}" for p in timeline.peak_activations)
    kinds = {s.action.kind for rank in timeline.spans for s in rank}
    legend = ", ".join(f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in kinds)
    if timeline.program.num_chunks > 1:
        legend += "; capital: chunk 0, small: later chunks"
    return "\n".join(
        [f"{timeline.program.schedule}: {share}, peak activations {peaks}", *lines, f"{legend}; {idle} idle"]
    )


def _columns(timeline: Timeline, available: int) -> int:
    """Return the number of columns: enough for the label of the shortest box if possible, and at most `available`."""
    shortest = min((s.end - s.start for rank in timeline.spans for s in rank if s.end > s.start), default=1.0)
    label = 2 + len(str(timeline.program.num_microbatches - 1))
    for per_box in range(label, 0, -1):
        needed = round(timeline.makespan / shortest * per_box)
        if needed <= available:
            return needed
    return available


def _label(timeline: Timeline, span: Span, room: int, mark: str) -> list[str]:
    """Return exactly `room` characters."""
    if room <= 0:
        return []
    action = span.action
    letter = action.kind if timeline.program.chunk_of(action.stage) == 0 else action.kind.lower()
    text = f"{letter}{action.microbatch}"
    if len(text) > room:
        text = letter
    if len(text) < room:
        text = mark + text if room >= len(text) + 1 else text
    return list(text.ljust(room))
