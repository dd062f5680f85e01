"""An SVG file of somebody else's run folder in a page of mine."""

from __future__ import annotations

import pytest

from automodel_cli.pipelining.schedule.programs import build_program
from automodel_cli.pipelining.timeline.simulator import even_costs, simulate
from automodel_cli.pipelining.timeline.svg import draw_svg
from automodel_cli.report.html_page import page_html
from automodel_cli.report.shown_run import ShownRun
from automodel_cli.report.svg_sanitizer import plain_svg

program = build_program("1F1B", 2, 4)
DRAWN = draw_svg(simulate(program, even_costs(program)), title="1F1B <&> it")


def test_a_schedule_of_ours_is_kept() -> None:
    found = plain_svg(DRAWN)
    assert found.count("<rect") == DRAWN.count("<rect") > 8 and found.count("<title>") == DRAWN.count("<title>")
    assert "1F1B &lt;&amp;&gt; it" in found and found.startswith("<svg ")
    assert found in page_html([ShownRun("x", [], layout={"pp": 2}, schedule=DRAWN)])


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>",
        "<rect onload='alert(1)'/>",
        "<foreignObject><iframe xmlns='http://www.w3.org/1999/xhtml' src='http://x'/></foreignObject>",
        "<script xmlns='http://www.w3.org/1999/xhtml'>alert(1)</script>",
        "<image href='http://x/y.png'/>",
        "<rect fill='url(http://x)'/>",
        "<a xmlns:xlink='http://www.w3.org/1999/xlink' xlink:href='javascript:alert(1)'><text>x</text></a>",
        "<style>@import 'http://x'</style>",
        "<text>",
        "<!-- --><text/>",
    ],
)
def test_what_a_browser_would_execute_or_load_is_left_out(inside: str) -> None:
    drawing = DRAWN.replace("</svg>", f"{inside}</svg>")
    assert plain_svg(drawing) == ""
    page = page_html([ShownRun("x", [], layout={"pp": 1}, schedule=drawing)])
    assert "alert" not in page and "http://x" not in page


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<script>alert(1)</script>",
        "</div><script>alert(1)</script>",
        "<!DOCTYPE svg [<!ENTITY a 'aaaa'>]><svg xmlns='http://www.w3.org/2000/svg'>&a;</svg>",
        "<html xmlns='http://www.w3.org/1999/xhtml'><script>alert(1)</script></html>",
        "x" * (1 << 25),
    ],
)
def test_what_is_no_drawing_is_left_out(text: str) -> None:
    assert plain_svg(text) == ""
