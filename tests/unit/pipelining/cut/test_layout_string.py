"""The layout language against the published vectors, and what its errors look like."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.cut.layout_string import LayoutError, parse_layout, validate_layout
from automodel_cli.pipelining.cut.placement import PlacementError, place_layers, place_layout, render_table
from tests.errors import raises

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "layouts.json").read_text())
DEEPSEEK_V3 = "Et*3|(tt|)*29,m|L"


def ids(row):
    return json.dumps(row["input"])[:60]


@pytest.mark.parametrize("row", VECTORS["parse"], ids=ids)
def test_parse(row):
    want = row["expect"]
    if want["ok"]:
        assert list(parse_layout(row["input"]).letters) == want["stages"]
    else:
        with pytest.raises(LayoutError) as error:
            parse_layout(row["input"])
        assert (error.value.code, error.value.position) == (want["code"], want["position"])


@pytest.mark.parametrize("row", VECTORS["place"] + VECTORS["from_list"], ids=ids)
def test_place(row):
    want = row["expect"]
    if not want["ok"]:
        with pytest.raises(LayoutError) as error:
            place_layout(row["input"], row["pp"])
        position = error.value.position
        assert (error.value.code, list(position) if isinstance(position, tuple) else position) == (
            want["code"],
            want["position"],
        )
        return
    placement = place_layout(row["input"], row["pp"])
    assert placement.num_chunks == want["vpp"]
    assert [[s.letters for s in placement.of_rank(r)] for r in range(row["pp"])] == want["layout"]
    if "num_decoder" in want:
        assert sum(s.num_layers for s in placement.stages) == want["num_decoder"]
        assert sum(s.letters.count("m") for s in placement.stages) == want["num_mtp"]


@pytest.mark.parametrize("row", VECTORS["validate"], ids=ids)
def test_validate(row):
    want = row["expect"]
    layout = parse_layout(row["input"])
    if want["ok"]:
        validate_layout(layout, row["pp"], row["num_layers"], row["mtp_num_layers"])
        placement = place_layout(layout, row["pp"])
        assert (placement.num_chunks, placement.mtp_standalone) == (want["vpp"], want["mtp_standalone"])
    else:
        with pytest.raises(LayoutError) as error:
            validate_layout(layout, row["pp"], row["num_layers"], row["mtp_num_layers"])
        assert (error.value.code, error.value.position) == (want["code"], want["position"])


@pytest.mark.parametrize("row", VECTORS["placement"], ids=ids)
def test_placement_options(row):
    options, want = dict(row["input"]), row["expect"]
    arguments = (options.pop("num_layers"), options.pop("pp"))
    options["vpp_size"] = options.pop("vpp", None)
    if not want["ok"]:
        with pytest.raises((PlacementError, LayoutError)) as error:
            place_layers(*arguments, **options)
        assert error.value.code == want["code"]
        return
    placement = place_layers(*arguments, **options)
    assert [[s.rank, s.chunk, s.num_layers, s.offset] for s in placement.stages] == want["stages"]
    assert (placement.num_chunks, placement.microbatch_group_size) == (want["vpp"], want["group"])
    if "mtp_ranks" in want:
        assert (placement.mtp_standalone, list(placement.mtp_ranks)) == (want["mtp_standalone"], want["mtp_ranks"])


def test_deepseek_v3_table():
    lines = render_table(place_layers(61, 16, layout=DEEPSEEK_V3, mtp_num_layers=1)).splitlines()
    assert lines[:2] == [
        f"layout {DEEPSEEK_V3}",
        "16 ranks x 2 chunks = 32 stages, 61 decoder layers, 1 MTP layer standalone on rank 14",
    ]
    body = [" ".join(line.split()) for line in lines[4:]]
    assert len(body) == 16
    assert body[0] == "0 s0 Ettt embedding + layers 0-2 s16 tt layers 33-34"
    assert body[13] == "13 s13 tt layers 27-28 s29 tt layers 59-60"
    assert body[14] == "14 s14 tt layers 29-30 s30 m 1 MTP"
    assert body[15] == "15 s15 tt layers 31-32 s31 L loss"


def test_errors_show_string_and_caret():
    with pytest.raises(ConfigError) as error:
        parse_layout("Et|t*2,3|L")
    assert str(error.value).splitlines() == [
        "layout: a number must follow '*' directly",
        "  Et|t*2,3|L",
        "         ^",
    ]
    with pytest.raises(ConfigError) as error:
        validate_layout(parse_layout("Et|t|m|L"), 2, 2, 1)
    assert str(error.value).splitlines()[1:] == ["  Et|t|m|L", "       ^"]
    with raises(LayoutError, "stage-count", values=(3, "pp_size=2")) as stages:
        place_layout("E|t|L", 2)
    assert str(stages.value).splitlines()[2].startswith("  fix   mesh.pp_size=1 ")


@pytest.mark.parametrize("source", ["t*100001", "t*" + "9" * 5000, "(t*1000)*101", "(t*99999)*2", "|*99999|*99999"])
def test_expansion_is_bounded(source):
    with pytest.raises(LayoutError) as error:
        parse_layout(source)
    assert error.value.code == "too-long"


def test_random_strings_agree_with_textual_expansion():
    """Every string the grammar accepts means what repeated text substitution makes of it."""
    rng = random.Random(0)
    accepted = 0
    for _ in range(4000):
        source = "".join(rng.choice("EtmL||,()**233") for _ in range(rng.randrange(1, 9)))
        try:
            letters = parse_layout(source).letters
        except LayoutError:
            continue
        accepted += 1
        assert list(letters) == _expand(source).split("|"), source
    assert accepted > 500


def _expand(source: str) -> str:
    for pattern in (r"([EtmL|])\*(\d+)", r"\(([^()]*)\)\*(\d+)"):
        source = re.sub(pattern, lambda m: m[1] * int(m[2]), source)
    return source.replace(",", "")


def test_layout_and_schedule_modules_are_torch_free():
    names = (
        *("cut.placement", "cut.layer_ranges", "cut.layout_string"),
        *("schedule.schedules", "schedule.programs", "schedule.one_f_one_b", "schedule.stage_ranks"),
        *("timeline.simulator", "timeline.svg"),
        *("megatron_core.arithmetic", "megatron_core.grad_sync"),
    )
    imports = ", ".join(f"automodel_cli.pipelining.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
