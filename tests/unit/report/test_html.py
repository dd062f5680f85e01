"""The drawing is checked by its geometry, the page by what it must hold and must not load."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from automodel_cli.report.axes import nice_ticks, padded_range, smoothed, thinned, tick_label
from automodel_cli.report.curve import loss_curve_svg
from automodel_cli.report.html import ShownSample, write_report
from automodel_cli.report.software_versions import environment

SVG = "{http://www.w3.org/2000/svg}"


def rows(num_steps: int, every: int = 0) -> list[dict]:
    found = []
    for step in range(1, num_steps + 1):
        found.append({"step": step, "loss": 4.0 / step, "grad_norm": 1.0 + step % 3, "lr": 1e-3})
        if every and step % every == 0:
            found.append({"step": step, "val_loss": 4.5 / step})
    return found


def lines(svg: str, css: str) -> list[list[tuple[float, float]]]:
    paths = [p.attrib["d"] for p in ET.fromstring(svg).iter(f"{SVG}path") if p.attrib["class"] == css]
    pairs = [re.findall(r"([\d.]+) ([\d.]+)", path) for path in paths]
    return [[(float(x), float(y)) for x, y in pair] for pair in pairs]


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "about", "want"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.93, 3.4, 5, [1.0, 1.5, 2.0, 2.5, 3.0]),
        (0, 400, 8, [0, 50, 100, 150, 200, 250, 300, 350, 400]),
        (1e-4, 4e-4, 3, [1e-4, 2e-4, 3e-4, 4e-4]),
        (3, 3, 5, [3]),
    ],
)
def test_ticks_are_round_and_inside(low, high, about, want):
    assert nice_ticks(low, high, about) == pytest.approx(want)


def test_tick_labels_carry_the_decimals_they_need():
    assert [tick_label(t, [0.5, 1.0, 1.5]) for t in (0.5, 1.0)] == ["0.5", "1.0"]
    assert [tick_label(t, [0, 20_000]) for t in (0, 20_000)] == ["0", "20k"]
    assert tick_label(5e-5, [0.0, 5e-5]) == "5e-05"
    assert tick_label(0.05, [0.05, 0.1]) == "0.05"


def test_points_are_averaged_not_dropped():
    points = [(float(k), float(k % 2)) for k in range(1000)]
    few = thinned(points, 100)
    assert len(few) == 100 and all(y == 0.5 for _, y in few)
    assert thinned(points, 1000) == points
    straight = [(float(k), 2.0 * k) for k in range(50)]
    assert smoothed(straight, 9) == straight  # a mean that lagged would lie below
    assert [y for _, y in smoothed([(0, 0), (1, 3), (2, 0)], 3)] == [0, 1, 0]


def test_ranges_are_never_empty_nor_needlessly_negative():
    assert padded_range([2.0, 2.0])[0] < 2.0 < padded_range([2.0, 2.0])[1]
    assert padded_range([0.0, 1.0])[0] == 0.0
    assert padded_range([-1.0, 1.0])[0] < -1.0


def test_every_point_lies_where_its_numbers_say():
    svg = loss_curve_svg(rows(20, every=10), title="run")
    (train,) = lines(svg, "lc-train")[:1]
    assert len(train) == 20
    xs = [x for x, _ in train]
    assert [round(b - a, 1) for a, b in pairwise(xs)] == [pytest.approx(xs[1] - xs[0], abs=0.2)] * 19
    scale = (train[1][1] - train[0][1]) / (2.0 - 4.0)  # pixels for one unit of loss
    for step, (_, y) in enumerate(train, 1):
        assert y == pytest.approx(train[0][1] + (4.0 / step - 4.0) * scale, abs=0.2)
    val = lines(svg, "lc-val")[0]
    assert val[0][0] == pytest.approx(train[9][0]) and val[1][0] == pytest.approx(train[19][0])
    assert val[0][1] == pytest.approx(train[0][1] + (0.45 - 4.0) * scale, abs=0.2)
    width, height = map(float, ET.fromstring(svg).attrib["viewBox"].split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for css in ("lc-train", "lc-norm") for x, y in lines(svg, css)[0])


def test_labels_title_and_final_values():
    found = texts(loss_curve_svg(rows(20, every=10), title="a <b> & c"))
    assert {"a <b> & c", "loss", "gradient norm", "step", "train 0.2", "validation 0.225"} <= set(found)


def test_a_long_run_stays_small_and_a_short_one_is_drawn():
    assert len(loss_curve_svg(rows(100_000, every=100), title="long")) < 60_000
    assert "lc-raw" in loss_curve_svg(rows(100), title="x").split("</style>")[1]
    assert "lc-raw" not in loss_curve_svg(rows(5), title="x").split("</style>")[1]
    assert "<circle" in loss_curve_svg(rows(1), title="one step")
    assert "no step was recorded" in texts(loss_curve_svg([], title="nothing"))


def test_numbers_that_are_missing_or_infinite_are_left_out():
    odd = [{"step": 1, "loss": None}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": 1.0}, {"step": 4, "loss": 2.0}]
    assert len(lines(loss_curve_svg(odd, title="x"), "lc-train")[0]) == 2


def test_dark_pages_have_their_own_colours():
    style = loss_curve_svg(rows(5), title="x").partition("</style>")[0]
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    assert set(re.findall(r"\.lc-\w+", light)) == set(re.findall(r"\.lc-\w+", dark))


class Links(HTMLParser):
    """Everything that a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.found += [name for name, _ in attrs if name in ("src", "href", "onload", "onclick")]


def test_the_page_is_whole_escaped_and_loads_nothing(tmp_path):
    run_dir = tmp_path / "quick-0001"
    run_dir.mkdir()
    path = write_report(
        run_dir,
        rows=rows(50, every=10),
        numbers={"loss": "0.08", "val loss": "0.09"},
        environment=environment("cpu", 2),
        config_yaml="model: {pretrained: <script>alert(1)</script>}",
        samples=[ShownSample("2+3?", "5", before="<b>", expected="5"), ShownSample("1+1?", "2")],
    )
    page = path.read_text()
    links = Links()
    links.feed(page)
    assert links.found == []
    for text in ("quick-0001", "0.08", "2 x cpu", "torch", "&lt;script&gt;alert(1)", "&lt;b&gt;", "before", "<svg"):
        assert text in page, text
    assert path.stat().st_size < 40_000
    assert ET.fromstring((run_dir / "loss.svg").read_text()).tag == f"{SVG}svg"


def test_columns_without_content_are_not_shown(tmp_path):
    path = write_report(
        tmp_path, rows=[], numbers={}, environment={}, config_yaml="", samples=[ShownSample("2+3?", "5")]
    )
    assert "<th>after</th>" in path.read_text() and "<th>before</th>" not in path.read_text()


def test_reinforcement_learning_leads_with_rewards(tmp_path):
    """What says how it goes stands first, in the curves as in the tiles; long names have places to break."""
    keys = ("reward", "response_length", "entropy", "token_mult_prob_error")
    learnt = [{**row, **dict.fromkeys(keys, 1.0)} for row in rows(40)]
    numbers = {"loss": "0.08", "sampling_importance_ratio": "1", "reward": "0.7", "val_reward": "0.6", "lr": "1"}
    path = write_report(tmp_path, rows=learnt, numbers=numbers, environment={}, config_yaml="")
    page = path.read_text()
    headings = re.findall("<h2>(.*?)</h2>", page)[:5]
    assert headings == ["Reward", "Response length", "Entropy", "Mismatch of sampler and trainer", "Loss"]
    tiles = re.findall("<dt>(.*?)</dt>", page)
    assert tiles == ["reward", "val reward", "loss", "sampling importance ratio", "lr"]
    plain = write_report(tmp_path, rows=rows(40), numbers={"loss": "1", "lr": "1"}, environment={}, config_yaml="")
    assert re.findall("<h2>(.*?)</h2>", plain.read_text())[0] == "Loss"
    assert re.findall("<dt>(.*?)</dt>", plain.read_text()) == ["loss", "lr"]
