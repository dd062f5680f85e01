"""The simulator against 372 published rows, the papers' closed forms and latencies; and the drawings."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.programs import build_program
from automodel_cli.pipelining.timeline.simulator import (
    Costs,
    even_costs,
    peak_activations,
    simulate,
)
from automodel_cli.pipelining.timeline.svg import draw_svg, draw_text

ROWS = json.loads((Path(__file__).parents[3] / "vectors" / "bubbles.json").read_text())["rows"]
KEYS = ("makespan", "idle", "idle_fraction", "lower_bound", "efficiency")


def program_of(row):
    name = "Interleaved1F1B" if row["schedule"] == "InterleavedGrouped" else row["schedule"]
    return build_program(name, row["p"], row["m"], row["v"], group_size=row["group"], extra_warmup=row["extra_warmup"])


def test_bubble_vectors():
    for row in ROWS:
        if "error" in row:
            with pytest.raises(ConfigError):
                program_of(row)
            continue
        program = program_of(row)
        overlap = float(row["overlap"].removeprefix("atomic-")) if (row["overlap"] or "").startswith("atomic") else None
        costs = even_costs(program, row["F"], row["I"], row["W"], overlap=overlap)
        timeline = simulate(program, costs)
        assert [getattr(timeline, key) for key in KEYS] == [
            None if row[key] is None else pytest.approx(row[key], abs=5e-5) for key in KEYS
        ], row
        assert timeline.peak_activations == pytest.approx(row["peak_activations"], abs=5e-5), row
        assert timeline.idle_per_rank == pytest.approx(row["idle_per_rank"], abs=5e-5), row
        assert costs.of_rank(program, 0) == pytest.approx(row["work"])


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 3.0, 1.0)])
@pytest.mark.parametrize("p,m", [(2, 8), (4, 8), (4, 16), (8, 16)])
def test_closed_forms(p, m, costs):
    f, i, w = costs
    b = i + w

    def idle_and_peak(name, v=1, group=None):
        program = build_program(name, p, m, v, group_size=group)
        return simulate(program, even_costs(program, f, i, w)).idle, peak_activations(program)

    forms = {
        ("GPipe", 1, None): ((p - 1) * (f + b), [m] * p),
        ("1F1B", 1, None): ((p - 1) * (f + b), [min(m, p - r) for r in range(p)]),
        ("LoopedBFS", 2, None): ((p - 1) * (f + b) / 2, [m] * p),
        ("ZB-H1", 1, None): ((p - 1) * (f + i - w), [p] * p),
    }
    for v in (2, 3):
        for g in (p, m):
            peaks = [min(m * v, (v - 1) * g + 2 * (p - 1 - r) + 1) / v for r in range(p)]
            forms["Interleaved1F1B", v, g] = ((p - 1) * (f + b) / v, peaks)
    if i >= w:
        forms["InterleavedZeroBubble", 2, None] = ((p - 1) * (f + i - w) / 2, [p] * p)
    for (name, v, group), (idle, peaks) in forms.items():
        got = idle_and_peak(name, v, group)
        assert got[0] == pytest.approx(idle), (name, v, group)
        if name != "ZB-H1" or i >= w:
            assert got[1] == pytest.approx(peaks), (name, v, group)


def test_makespan_under_latency():
    """p=4, m=16, F=I=W=1, at hop 0 / 0.1 / 0.5."""
    table = {
        ("1F1B", 1, None): (57, 59.8, 71),
        ("Interleaved1F1B", 2, 4): (52.5, 53.9, 59.5),
        ("Interleaved1F1B", 2, 8): (52.5, 53.1, 55.5),
        ("Interleaved1F1B", 4, 4): (50.25, 53.25, 75.75),
        ("Interleaved1F1B", 4, 8): (50.25, 50.85, 60.25),
        ("InterleavedZeroBubble", 2, None): (49.5, 51.1, 66),
        ("ZBVZeroBubble", 2, None): (49.5, 50.8, 56.5),
        ("DualPipeV", 2, None): (49.5, 50.8, 58),
    }
    for (name, v, group), want in table.items():
        program = build_program(name, 4, 16, v, group_size=group)
        assert [simulate(program, even_costs(program, hop=hop)).makespan for hop in (0, 0.1, 0.5)] == pytest.approx(
            want
        ), name


def test_uneven_stages_and_the_first_stages_free_input_gradient():
    program = build_program("GPipe", 2, 1)
    costs = Costs((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), hop=0.25)
    timeline = simulate(program, costs)
    assert timeline.makespan == pytest.approx(1 + 0.25 + 2 + 4 + 0.25 + 2)
    assert timeline.lower_bound == pytest.approx(1 + 0.25 + 6)
    assert timeline.busy == (3.0, 6.0)
    free = even_costs(build_program("ZB-H1", 2, 2), first_stage_needs_no_input_gradient=True)
    assert (free.backward_input, free.backward_weight) == ((0.0, 1.0), (2.0, 1.0))
    assert peak_activations(build_program("1F1B", 2, 4), [10.0, 3.0]) == (20.0, 3.0)


@pytest.mark.parametrize("name,v,overlap", [("1F1B", 1, None), ("Interleaved1F1B", 2, None), ("DualPipeV", 2, 0.75)])
def test_svg_boxes_are_the_spans(name, v, overlap):
    program = build_program(name, 4, 12, v)
    timeline = simulate(program, even_costs(program, overlap=overlap))
    root = ElementTree.fromstring(draw_svg(timeline, title="a < b"))
    space = "{http://www.w3.org/2000/svg}"
    rects = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    spans = [span for rank in timeline.spans for span in rank]
    assert len(rects) == len(spans)
    scale = float(rects[0].get("width")) / (spans[0].end - spans[0].start)
    for span, rect in zip(spans, rects, strict=True):
        assert float(rect.get("width")) == pytest.approx((span.end - span.start) * scale, abs=0.02)
        assert float(rect.get("x")) == pytest.approx(float(rects[0].get("x")) + span.start * scale, abs=0.05)
    per_rank = {rect.get("y") for rect in rects}
    assert len(per_rank) == 4 * (2 if overlap else 1)
    assert root.get("viewBox") and "a < b" in "".join(root.itertext())


def test_text_drawing():
    program = build_program("1F1B", 2, 3)
    timeline = simulate(program, even_costs(program))
    assert draw_text(timeline, width=60, ascii_only=True).splitlines() == [
        "1F1B: idle 25.0%, makespan 12, peak activations 2, 1",
        "rank 0 |F0|F1......|B0   |F2|B1   ...|B2   ",
        "rank 1 ...|F0|B0   |F1|B1   |F2|B2   ......",
        "F forward, B backward; . idle",
    ]
    for width in (30, 80, 200):
        program = build_program("ZBVZeroBubble", 4, 24, 2)
        lines = draw_text(simulate(program, even_costs(program)), width=width).splitlines()[1:5]
        assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= width
