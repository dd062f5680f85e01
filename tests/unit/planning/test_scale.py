"""A plan on more GPUs against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.planning.goodput import HOURS, Cluster, best_interval, expected
from automodel_cli.planning.hardware import COLLECTIVE_SECONDS, GPUS, Links
from automodel_cli.planning.plan import make_plan
from automodel_cli.planning.scale import Assumptions, expected_maximum, layouts, render, scale, simulated_maximum
from tests.e2e.command import automodel, write_config
from tests.errors import assert_error
from tests.unit.planning.test_plan import request

CLUSTER = Cluster(nodes=1, step=1.0, node_mtbf=6250 * HOURS, restart=600.0, spares=None)
LINKS = Links(450e9, 50e9, 8, GPUS["h100"].rates)
ASSUMED = Assumptions(CLUSTER, LINKS, save=30.0, save_rate=1e9)


@pytest.mark.parametrize("nodes", [2, 8, 64, 512])
def test_messages_on_two_levels_and_a_spine(nodes: int) -> None:
    """A ring over whole nodes uses their 8 cards; 45 GB gathered, and twice that summed."""
    ranks = range(nodes * 8)
    share = (len(ranks) - 1) / len(ranks)
    for spine in (1.0, 4.0):
        links = replace(LINKS, oversubscription=spine)
        slower = spine if nodes > links.leaf else 1.0
        for kind, times in (("allgather", 1), ("allreduce", 2)):
            took = (links.seconds(kind, 45e9, ranks) - COLLECTIVE_SECONDS) * links.rates.network
            assert took == pytest.approx(times * share * 45e9 / min(450e9, 8 * 50e9 / slower))


def test_the_slowest_of_many_nodes_is_the_expected_maximum() -> None:
    """By integration of x n phi(x) Phi(x)^(n-1), and by simulation."""
    normal, width = NormalDist(), 1e-2
    for number in (2, 8, 64, 512):
        points = [-8 + width * i for i in range(1601)]
        exact = sum(x * number * normal.pdf(x) * normal.cdf(x) ** (number - 1) * width for x in points)
        assert expected_maximum(number) == pytest.approx(exact, rel=0.05)
    assert simulated_maximum(64, 0.02, 2000) == pytest.approx(1 + 0.02 * expected_maximum(64), rel=1e-3)
    assert expected_maximum(1) == 0.0


def test_layouts_keep_the_model_axes_and_double_the_data_parallel_ones() -> None:
    found = [*layouts(Layout(dp_shard=4, tp=2), 8)]
    assert [layout.world_size for name, layout in found if name == "full"] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert all(layout.tp == 2 for _, layout in found)
    assert {layout.dp_shard for name, layout in found if name == "hybrid"} == {4}
    assert {name for name, _ in layouts(Layout(dp_shard=8), 8, shards=False, hybrid=False)} == {"copies"}


@pytest.mark.parametrize(
    ("options", "code", "keys"),
    [
        (("--jitter", "0.1"), "requires_setting", ("--jitter", "--scale")),
        (("--scale", "--goodput"), "mutually_exclusive", ("--scale", "--goodput")),
        (("--scale", "--oversubscription", "0.5"), "out_of_range", ("--oversubscription",)),
    ],
)
def test_options_that_do_not_belong_together_are_rejected(
    options: tuple[str, ...], code: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    write_config(tmp_path)
    found = automodel(tmp_path, "plan", "-c", "tiny.yaml", "--gpus", "1", *options)
    assert found.returncode == 2
    assert_error(found.stderr, code, *keys)


def test_rows_scale_as_their_messages_and_failures_do() -> None:
    plan = make_plan(request(layout=Layout(dp_shard=8), pipeline=None, parallelizer=FSDP2Config()))
    rows = scale(plan, ASSUMED, memory_gib=79.1, largest=512)
    assert rows == scale(plan, ASSUMED, memory_gib=79.1, largest=512)
    full, hybrid = ([row for row in rows if row.sharding == name] for name in ("full", "hybrid"))
    assert [row.gpus for row in full] == [64, 128, 256, 512] == [row.gpus for row in hybrid]
    assert [row.time.step_seconds for row in full] == sorted(row.time.step_seconds for row in full)
    assert all(h.peak > f.peak for f, h in zip(full, hybrid, strict=True))
    for row in full:
        cluster = replace(CLUSTER, nodes=row.gpus // 8, step=row.time.step_seconds, save=30.0)
        young = math.sqrt(2 * 30.0 * cluster.mtbf) / cluster.step
        assert row.interval == pytest.approx(young, rel=0.05) and row.interval == best_interval(cluster)
        assert row.goodput.kept == pytest.approx(expected(cluster, row.interval), rel=0.01)
    slower = scale(plan, replace(ASSUMED, jitter=0.05), memory_gib=79.1, largest=64)
    assert slower[0].slowest == pytest.approx(1 + 0.05 * expected_maximum(8))
    assert len(render(rows).splitlines()[0]) <= 80
