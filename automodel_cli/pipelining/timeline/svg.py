"""A timeline as SVG for files and as plain text for the terminal. Nothing to install; torch-free. PNG: `raster.py`."""

from __future__ import annotations

import html

from automodel_cli.pipelining.timeline.picture import KIND_NAMES, Box, Rule, Shape, schedule_picture
from automodel_cli.pipelining.timeline.simulator import Span, Timeline


def draw_svg(timeline: Timeline, *, title: str | None = None, unit: str = "") -> str:
    """The timeline as one SVG document, showing `schedule_picture`; boxes explain themselves under the mouse."""
    picture = schedule_picture(timeline, title=title, unit=unit)
    size = f"width='{picture.width}' height='{picture.height}' viewBox='0 0 {picture.width} {picture.height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='Inter, Helvetica, Arial, sans-serif'>"
    return "\n".join([head, *(_svg(shape) for shape in picture.shapes), "</svg>"])


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rule):
        ends = f"x1='{shape.x:.1f}' y1='{shape.top:.1f}' x2='{shape.x:.1f}' y2='{shape.bottom:.1f}'"
        return f"<line {ends} stroke='{shape.colour}'/>"
    if isinstance(shape, Box):
        place = f"x='{shape.x:.2f}' y='{shape.y:.1f}' width='{shape.width:.2f}' height='{shape.height:.1f}'"
        stroke = f" stroke='{shape.stroke}'" if shape.stroke else ""
        tip = f"<title>{html.escape(shape.tip)}</title>" if shape.tip else ""
        return f"<rect {place} rx='{shape.radius:g}' fill='{shape.fill}'{stroke}>{tip}</rect>"
    weight = " font-weight='600'" if shape.bold else ""
    style = f"font-size='{shape.size:g}' fill='{shape.colour}' text-anchor='{shape.anchor}'{weight}"
    return f"<text x='{shape.x:.1f}' y='{shape.y:.1f}' {style}>{html.escape(shape.text)}</text>"


def draw_text(timeline: Timeline, *, width: int = 120, ascii_only: bool = False) -> str:
    """The timeline for a terminal: a line per rank, boxes `F0`, `B0`, ... cut to `width` columns of time.

    Letters say the kind (F forward, B backward, I input gradients, W weight gradients), numbers the microbatch; the
    chunk of the rank is in the case (chunk 0 capital, later ones small). A box too narrow for its number shows the
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
    share = f"idle {timeline.idle_fraction:.1%}, makespan {timeline.makespan:.4g}"
    peaks = ", ".join(f"{p:g}" for p in timeline.peak_activations)
    kinds = {s.action.kind for rank in timeline.spans for s in rank}
    legend = ", ".join(f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in kinds)
    if timeline.program.num_chunks > 1:
        legend += "; capital: chunk 0, small: later chunks"
    return "\n".join(
        [f"{timeline.program.schedule}: {share}, peak activations {peaks}", *lines, f"{legend}; {idle} idle"]
    )


def _columns(timeline: Timeline, available: int) -> int:
    """As many as let the shortest box show its label, at most `available`; whole columns per shortest box."""
    shortest = min((s.end - s.start for rank in timeline.spans for s in rank if s.end > s.start), default=1.0)
    label = 2 + len(str(timeline.program.num_microbatches - 1))
    for per_box in range(label, 0, -1):
        wanted = round(timeline.makespan / shortest * per_box)
        if wanted <= available:
            return wanted
    return available


def _label(timeline: Timeline, span: Span, room: int, mark: str) -> list[str]:
    """Exactly `room` characters."""
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
