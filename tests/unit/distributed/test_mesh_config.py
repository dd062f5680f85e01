"""Mesh sizes on 8 ranks: what each request resolves to, what is refused and why, and that every suggested fix works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh_config import Layout, MeshConfig
from tests.errors import raises

# request -> (pp, dp_replicate, dp_shard, cp, tp), (dp, dp_shard_cp, dp_cp), (ep_shard, ep)
WORLD_8 = {
    "none": ({}, (1, 1, 8, 1, 1), (8, 8, 8), (8, 1)),
    "tp2": ({"tp_size": 2}, (1, 1, 4, 1, 2), (4, 4, 4), (8, 1)),
    "cp2": ({"cp_size": 2}, (1, 1, 4, 2, 1), (4, 8, 8), (8, 1)),
    "tp2 cp2": ({"tp_size": 2, "cp_size": 2}, (1, 1, 2, 2, 2), (2, 4, 4), (8, 1)),
    "pp2": ({"pp_size": 2}, (2, 1, 4, 1, 1), (4, 4, 4), (4, 1)),
    "pp2 tp2 cp2": (
        {"pp_size": 2, "tp_size": 2, "cp_size": 2},
        (2, 1, 1, 2, 2),
        (1, 2, 2),
        (4, 1),
    ),
    "rep2": ({"dp_replicate_size": 2}, (1, 2, 4, 1, 1), (8, 4, 8), (8, 1)),
    "rep2 cp2": (
        {"dp_replicate_size": 2, "cp_size": 2},
        (1, 2, 2, 2, 1),
        (4, 4, 8),
        (8, 1),
    ),
    "pp2 rep2": (
        {"pp_size": 2, "dp_replicate_size": 2},
        (2, 2, 2, 1, 1),
        (4, 2, 4),
        (4, 1),
    ),
    "ep8": ({"ep_size": 8}, (1, 1, 8, 1, 1), (8, 8, 8), (1, 8)),
    "ep2": ({"ep_size": 2}, (1, 1, 8, 1, 1), (8, 8, 8), (4, 2)),
    "tp2 ep4": ({"tp_size": 2, "ep_size": 4}, (1, 1, 4, 1, 2), (4, 4, 4), (2, 4)),
    "pp2 ep4": ({"pp_size": 2, "ep_size": 4}, (2, 1, 4, 1, 1), (4, 4, 4), (1, 4)),
}

REJECTED_8 = {
    "tp3": ({"tp_size": 3}, (8, "tp_size=3")),
    "ep3": ({"ep_size": 3}, (8, "ep_size=3")),
    "ep16": ({"ep_size": 16}, (8, "ep_size=16")),
    "pp2 ep8": ({"pp_size": 2, "ep_size": 8}, (4, "ep_size=8")),
    "rep8": ({"dp_replicate_size": 8}, ("dp_replicate_size=8", 8)),
    "rep3": ({"dp_replicate_size": 3}, (8, "dp_replicate_size=3")),
    "dp16": ({"dp_size": 16}, ("dp_size=16", 16, 8)),
    "dp3": ({"dp_size": 3}, ("dp_size=3", 3, 8)),
    "dp2 tp2": ({"dp_size": 2, "tp_size": 2}, ("tp_size=2", "dp_size=2", 4, 8)),
    "tp3 pp3": ({"tp_size": 3, "pp_size": 3}, (8, "tp_size=3", "pp_size=3")),
}


@pytest.mark.parametrize("request_name", WORLD_8)
def test_sizes_on_8_ranks(request_name):
    sizes, axes, derived, experts = WORLD_8[request_name]
    layout = MeshConfig(**sizes).resolve(8)
    assert (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp) == axes
    assert (layout.dp, layout.dp_shard_cp, layout.dp_cp) == derived
    assert (layout.ep_shard, layout.ep) == experts
    assert layout.world_size == 8


@pytest.mark.parametrize("request_name", REJECTED_8)
def test_rejected_with_the_reason_and_a_fix_that_works(request_name):
    sizes, values = REJECTED_8[request_name]
    config = MeshConfig(**sizes)
    with raises(ConfigError, "mesh_size", values=values) as caught:
        config.resolve(8)
    assert set(caught.value.keys) <= set(sizes)
    fixes = re.findall(r"mesh\.(\w+)=(\d+)", caught.value.fix)
    counts = [int(n) for n in re.findall(r"\d+", re.search(r"start (.*) ranks|$", caught.value.fix)[1] or "")]
    assert fixes or counts
    for name, value in fixes:
        replace(config, **{name: int(value)}).resolve(8)
    for num_ranks in counts:
        assert config.resolve(num_ranks).world_size == num_ranks


def test_the_nearest_values_come_first():
    with pytest.raises(ConfigError) as caught:
        MeshConfig(tp_size=3).resolve(8)
    assert caught.value.fix == "mesh.tp_size=4, or mesh.tp_size=2, or start 6 or 9 ranks"


@pytest.mark.parametrize("value", [0, -1, True, "two", 1.5])
def test_a_size_is_a_positive_integer(value):
    with raises(ConfigError, "out_of_range", keys=("tp_size",), values=(repr(value),), fix="mesh.tp_size=1"):
        MeshConfig(tp_size=value)


def test_null_is_the_default():
    assert MeshConfig(None, None, None, None, None, None).resolve(4) == Layout(dp_shard=4)


def test_a_layout_reads_as_its_sizes_and_back():
    layout = MeshConfig(pp_size=2, dp_replicate_size=2).resolve(8)
    assert str(layout) == "pp=2 x dp=4 x dp_replicate=2"
    assert str(Layout()) == "one rank"
    assert layout.to_config().resolve(8) == layout


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "ranks"),
    [
        ({}, 0, 1),
        ({}, 8, 8),
        ({"dp_size": 2}, 8, 2),
        ({"dp_size": 2}, 0, 2),
        ({"dp_replicate_size": 2}, 0, 4),
        ({"pp_size": 2, "ep_size": 4}, 0, 8),
        ({"pp_size": 2, "tp_size": 2}, 0, 4),
    ],
)
def test_ranks_to_start(sizes, num_gpus, ranks):
    assert MeshConfig(**sizes).num_ranks(num_gpus) == ranks


def test_more_ranks_than_gpus_are_refused():
    with raises(ConfigError, "mesh_size", values=("pp_size=2", "dp_size=8", 16, 8)) as caught:
        MeshConfig(pp_size=2, dp_size=8).num_ranks(8)
    assert "mesh.dp_size=4" in caught.value.fix
