"""The time model of `plan` and `dryrun` against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.planning.hardware import COLLECTIVE_SECONDS, GPUS, KERNEL_SECONDS, Links
from automodel_cli.planning.kernel import Kernel
from automodel_cli.planning.layer_calls import Call, Calls
from automodel_cli.planning.layer_costs import Unit
from automodel_cli.planning.layer_times import LayerTimes
from automodel_cli.planning.memory import Accounting
from automodel_cli.planning.plan import make_plan
from automodel_cli.planning.rank_groups import Groups
from automodel_cli.planning.step_time import RankTimes, apart, step_time
from automodel_cli.training.optimizers.nodes import AdamW
from automodel_cli.training.optimizers.param_groups import TrainableParam
from tests.unit.planning.test_plan import request

H100 = GPUS["h100"]
GEMM = Kernel("gemm", 2.0 * 4096 * 7168 * 2048, 2 * (4096 * 7168 + 7168 * 2048 + 4096 * 2048))


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory() -> None:
    kind, seconds = GEMM.seconds(H100)
    assert kind == "gemm" and seconds == pytest.approx(GEMM.flops / (0.75 * 989e12 * H100.rates.gemm), rel=0.01)
    assert Kernel("gemm", 1e3, 3.35e9).seconds(H100) == ("memory", pytest.approx(1e-3 / H100.rates.memory))
    assert Kernel("memory", 0.0, 8).seconds(H100) == ("memory", KERNEL_SECONDS)


@pytest.mark.parametrize(("length", "window"), [(700, None), (700, 128), (100, 128)])
def test_attention_counts_the_pairs_of_documents(length: int, window: int | None) -> None:
    """Queries, keys and values of one head of 64: 4 x 64 FLOPs a pair, half of the diagonal."""
    calls = Calls({}, document=length)
    x = torch.empty(1, 1, 7 * length, 64, device="meta", dtype=torch.bfloat16)
    calls.attention(0, (x, x, x, x), all_pairs=None, window=window, is_compiled=False)
    pairs = 7 * sum(min(i, window or i) - 0.5 for i in range(1, length + 1))
    (call,) = calls.at[0]
    assert call.forward.flops == pytest.approx(4 * 64 * pairs, rel=0.01)
    assert call.inputs[0].flops == 2.5 * call.forward.flops


def test_one_more_microbatch_and_a_step_with_one_follow_from_two_steps() -> None:
    assert apart({"gemm": 5.0}, {"gemm": 8.0}, 2, 4) == ({"gemm": 3.5}, {"gemm": 1.5})
    rank = RankTimes(8, 1000, 4, None, {}, None, {"gemm": 3.0, "node": 0.5}, {"gemm": 1.5}, {}, 0.0)
    found = step_time([rank], H100, 4)
    assert found.step_seconds == 3.5 + 7 * 1.5
    assert found.tokens_per_second_per_gpu == 8 * 1000 * 4 / 4 / 14.0


def times(layout: Layout, *, ring: bool = False, parallelizer: FSDP2Config | None = None) -> LayerTimes:
    parallelizer = parallelizer or FSDP2Config()
    accounting = Accounting(parallelizer.storage(), layout, AdamW(lr=1.0), 1)
    links, every = Links(H100.link, rates=H100.rates), parallelizer.reduces_every_microbatch
    return LayerTimes(H100, links, accounting, 1e8, False, sequence_parallel=True, ring=ring, reduces_every=every)


@pytest.mark.parametrize("layers", [2, 5])
def test_a_layer_that_computes_longer_than_it_is_gathered_hides_its_gather(layers: int) -> None:
    """Of FSDP2 on 8 ranks: the first gather is exposed, and the casts before each."""
    owner = nn.Linear(4096, 4096, bias=False, device="meta")
    unit = Unit((TrainableParam("weight", owner.weight, owner),))
    of = times(Layout(dp_shard=8))
    work = [Call(GEMM, (GEMM,), (GEMM,))] * 8
    segments = [of.layer(i, work, unit, 0.0, 0.0) for i in range(layers)]
    once, more = of.whole_step(segments, 1)
    gemm = GEMM.seconds(H100)[1]
    assert once["gemm"] == pytest.approx(layers * 8 * 3 * gemm)
    gather = COLLECTIVE_SECONDS + 7 / 8 * 2 * 4096**2 / (H100.link * H100.rates.node)
    reduce = COLLECTIVE_SECONDS + 7 / 8 * 4 * 4096**2 / (H100.link * H100.rates.node)
    assert once["node"] == pytest.approx(gather + reduce, rel=0.01) and not more


@pytest.mark.parametrize(
    ("option", "num_bytes"),
    [({"defer_fsdp_grad_sync": "experts"}, 4), ({"defer_fsdp_grad_sync": False, "keep_cast_experts": True}, 2)],
    ids=["reduced once a step", "gathered once a step"],
)
def test_experts_that_two_nodes_share_cross_the_network_once_a_step(option: dict[str, Any], num_bytes: int) -> None:
    """Each of 8 ranks of a node has one expert, half of it when sharded. Further microbatches save one message."""
    owner = nn.Module()
    owner.num_experts, owner.is_transposed, owner.has_gate = 8, False, True
    weight = nn.Parameter(torch.empty(8, 4096, 4096, device="meta"))
    unit = Unit((TrainableParam("experts.weight", weight, owner),))
    work = [Call(GEMM, (GEMM,), (GEMM,))]
    always, rarely = (
        of.whole_step([of.layer(0, work, unit, 0.0, 0.0)], 4)
        for of in (
            times(Layout(dp_shard=16, ep=8), parallelizer=FSDP2Config(**given))
            for given in ({"defer_fsdp_grad_sync": False}, option)
        )
    )
    message = COLLECTIVE_SECONDS + num_bytes * 4096**2 / 2 / (Links.network * H100.rates.network)
    assert always[0]["network"] == pytest.approx(rarely[0]["network"])
    assert always[1]["network"] - rarely[1]["network"] == pytest.approx(message)


def test_tensor_parallelism_waits_for_four_messages_a_layer_and_direction() -> None:
    of = times(Layout(tp=4))
    segment = of.layer(0, [Call(GEMM, (GEMM,), (GEMM,))], Unit(()), 0.0, 0.0)
    message = COLLECTIVE_SECONDS + 3 / 4 * 1e8 / (H100.link * H100.rates.node)
    found = of.actions([segment])
    assert found["F"]["node"] == pytest.approx(4 * message) == pytest.approx(found["I"]["node"])
    assert "node" not in found["W"]
    assert found["F"]["gemm"] == pytest.approx(GEMM.scaled(1 / 4).seconds(H100)[1])


def test_a_ring_hides_behind_attention_and_a_gather_does_not() -> None:
    busy = [Call(GEMM, (GEMM,))] * 20
    exposed = [times(Layout(cp=2), ring=ring).layer(0, busy, Unit(()), 0.0, 1e7) for ring in (True, False)]
    found = [times(Layout(cp=2), ring=ring).actions([s])["F"] for ring, s in zip((True, False), exposed, strict=True)]
    assert found[0].get("node", 0.0) == 0.0 and found[1]["node"] > COLLECTIVE_SECONDS


def test_groups_have_the_neighbors_of_the_mesh() -> None:
    groups = Groups(Layout(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=4))
    assert [*groups.tp] == [0, 1] and [*groups.cp] == [0, 2] and [*groups.ep] == [0, 1, 2, 3]
    assert [*groups.shard] == [0, 2, 4, 6, 8, 10, 12, 14] and [*groups.replicate] == [0, 16]
    assert groups.stages == (0, 32)


def test_more_ranks_and_recomputation_change_the_time_of_a_plan() -> None:
    one = make_plan(request(layout=Layout(), pipeline=None, parallelizer=FSDP2Config()))
    again = make_plan(
        request(layout=Layout(), pipeline=None, parallelizer=FSDP2Config(activation_checkpointing="full"))
    )
    assert again.time.step_seconds > 1.1 * one.time.step_seconds
    assert one.time.step_range.low < one.time.step_seconds < one.time.step_range.high
    plan = make_plan(request())
    assert plan.timeline is not None and plan.time.step_seconds > plan.timeline.makespan
