"""The drawing is checked by its geometry, the page by what it must hold and must not load."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

from automodel_cli.report.chart_axes import nice_ticks, padded_range, smoothed, thinned, tick_label
from automodel_cli.report.charts import layout_svg
from automodel_cli.report.html_page import page_html
from automodel_cli.report.loss_curve import loss_curve_svg
from automodel_cli.report.shown_run import Dataset, ShownRun, ShownSample
from automodel_cli.report.software_versions import environment
from automodel_cli.report.sparkline import panel_svg

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
    assert tick_label(0.0, [0.0, 1e-5, 2e-5]) == "0"
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
    assert padded_range([1.0000003, 1.0000012]) == pytest.approx((0.9, 1.1), abs=1e-5), "drawn as a constant"
    assert padded_range([2.300, 2.309])[1] < 2.32, "a small change of the loss stays visible"


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


def test_the_page_is_whole_escaped_and_loads_nothing():
    page = page_html(
        [
            ShownRun(
                name="quick-0001",
                rows=rows(50, every=10),
                numbers={"loss": "0.08", "val loss": "0.09"},
                environment=environment("cpu", 2),
                config_yaml="model: {pretrained: <script>alert(1)</script>}",
                samples=[ShownSample("2+3?", "5", before="<b>", expected="5"), ShownSample("1+1?", "2")],
                command="automodel finetune llm -c quickstart 'run_name=a&b'",
                data=[Dataset("x.jsonl", "2 documents", [0, 8, 16], [1, 1], trained=0.25, fill=0.5)],
                layout={"pp": 2, "dp_shard": 2, "tp": 2},
            )
        ]
    )
    links = Links()
    links.feed(page)
    assert links.found == []
    for text in ("quick-0001", "0.08", "2 x cpu", "torch", "&lt;script&gt;alert(1)", "&lt;b&gt;", "before", "<svg"):
        assert text in page, text
    for text in ("run_name=a&amp;b", "25.0% trained", "rows 50.0% full", "8 ranks: pp 2 x dp_shard 2 x tp 2"):
        assert text in page, text
    assert len(page) < 60_000


def test_columns_without_content_are_not_shown():
    page = page_html([ShownRun("x", [], samples=[ShownSample("2+3?", "5")])])
    assert "<th>after</th>" in page and "<th>before</th>" not in page


def test_pictures_of_samples_are_part_of_the_page_and_nothing_else_is_an_image():
    good = "data:image/jpeg;base64,/9j/AAAA"
    bad = (
        "https://example.com/x.png",
        "javascript:alert(1)",
        'data:image/png;base64,A"onload="x',
        "data:text/html;base64,AA",
    )
    samples = [
        ShownSample("color?", "red", pictures=[good, *bad]),
        ShownSample("color?", "blue", pictures=[good + "AA=="]),
    ]
    for runs in ([ShownRun("x", [], samples=samples)], [ShownRun(name, [], samples=samples) for name in "xy"]):
        page = page_html(runs)
        assert re.findall('src="(.*?)"', page) == [good, good + "AA=="]
        assert page.count("<pre>color?</pre>") == 2, "equal questions about other pictures are other prompts"


def test_reinforcement_learning_leads_with_rewards():
    """What says how it goes stands first, in the curves as in the tiles; long names have places to break."""
    keys = ("reward", "response_length", "entropy", "token_mult_prob_error")
    learnt = [{**row, **dict.fromkeys(keys, 1.0)} for row in rows(40)]
    numbers = {"loss": "0.08", "sampling_importance_ratio": "1", "reward": "0.7", "val_reward": "0.6", "lr": "1"}
    page = page_html([ShownRun("x", learnt, numbers)])
    headings = re.findall("<figcaption><b>(.*?)</b>", page)[:5]
    assert headings == ["Reward", "Response length", "Entropy", "Mismatch of sampler and trainer", "Loss"]
    tiles = re.findall("<dt>(.*?)</dt>", page)
    assert tiles == ["reward", "val reward", "loss", "sampling importance ratio", "lr"]
    plain = page_html([ShownRun("x", rows(40), {"loss": "1", "lr": "1"})])
    assert re.findall("<figcaption><b>(.*?)</b>", plain)[0] == "Loss"
    assert re.findall("<dt>(.*?)</dt>", plain) == ["loss", "lr"]


def test_many_final_values_give_twelve_tiles_and_a_table():
    numbers = {f"detail_{i}": str(i) for i in range(40)} | {
        "reward": "0.7",
        "best val_reward": "0.8",
        "val_reward": "0.6",
    }
    learnt = [{**row, "reward": 1.0} for row in rows(40)]
    page = page_html([ShownRun("x", learnt, numbers)])
    tiles = re.findall("<dt>(.*?)</dt>", page)
    assert len(tiles) == 12 and tiles[:2] == ["reward", "val reward"] and "best val reward" in tiles
    assert page.count("<th>detail ") == 40, "the table has the others too"


def test_labels_of_the_y_axis_have_space():
    """7 pixels a character suffice for the 12 px font of the page. `-0.1046` needs more than the usual margin."""
    svg = panel_svg([[{"step": s, "loss": -0.1 - s * 5e-6} for s in range(900, 1000)]], "loss", label="Loss")
    labels = [(float(x), text) for x, text in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="end">([^<]+)<', svg)]
    of_y = [(x, text) for x, text in labels if text.startswith("-")]
    assert of_y and all(x >= 7 * len(text) for x, text in of_y), labels


def test_several_runs_share_axes_and_each_has_its_colour():
    """Curves of two runs on one plane: equal values lie at equal heights, whichever run they belong to."""
    slower = [{**row, "loss": row["loss"] * 2} for row in rows(20)]
    svg = panel_svg([rows(20), slower], "loss", label="Loss")
    first, second = (lines(svg.replace("<svg", f'<svg xmlns="{SVG[1:-1]}"'), f"line c{index}")[0] for index in (0, 1))
    assert first[0][1] == pytest.approx(second[1][1], abs=0.11), "4.0 of step 1 and of step 2"
    assert first[0][0] == second[0][0] and first[0][1] > second[0][1]
    page = page_html([ShownRun("a", rows(20), {"loss": "0.2"}), ShownRun("b", slower)], [["optimizer.lr", "1", "2"]])
    assert '<i class="c0"></i>a' in page and '<i class="c1"></i>b' in page
    assert "<td>optimizer.lr</td><td>1</td><td>2</td>" in page


def test_ranks_are_numbered_as_the_mesh_numbers_them():
    """Row-major with pp outermost and tp innermost, against the mesh that torch would build."""
    svg = layout_svg({"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2})
    cells = re.findall(r'<rect class="c(\d)" x="(\d+)" y="(\d+)".*?\n<text class="in".*?>(\d+)<', svg)
    mesh = torch.arange(8).view(2, 2, 2)
    for stage in range(2):
        block = [(int(y), int(x), int(rank)) for c, x, y, rank in cells if int(c) == stage]
        assert [rank for *_, rank in sorted(block)] == mesh[stage].flatten().tolist()
