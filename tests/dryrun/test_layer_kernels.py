"""A layer of experts beside one written by hand, traced by the same means: one microbatch between others, nothing
recomputed, gradients added up in float32.

By hand is what somebody would launch who writes the layer on the same library of products, with one exchange each way:
a router in one kernel, one sort, one copy of the rows on each side, gates and sums fused. Its weights are bfloat16
already: they are cast once a step.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from automodel_cli.distributed.expert_parallel import permute, topk_router
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.expert_parallel.router_detection import routers_in
from automodel_cli.dryrun.fake_device.dispatch_mode import TracedRank
from automodel_cli.dryrun.trace_rank import trace
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.dryrun.worker import load
from tests.dist.harness import launch
from tests.dryrun.test_recipes import _fewer_layers

_MOST = 1.3
_OF_THE_NEXT = ("fsdp::all_gather_copy_in", "_foreach_copy_")  # layer, whose parameters are gathered meanwhile
_LAYERS = 3  # of which the middle one counts: the first begins a microbatch, the last stays gathered
_MICROBATCHES = 3  # of which the middle one counts: the first makes the sums, the last reduces them

Table = dict[str, tuple[int, int, float]]
"""Operator -> launches, bytes, seconds."""


@dataclass
class Watch:
    """What runs between two moments, on the tracer that is made while this is in place."""

    found: list[Table] = field(default_factory=list)
    tracer: Any = None
    _began: tuple[Counter[str], Counter[str], Counter[str]] | None = None

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        assert self._began is not None
        launches, moved, seconds = (after - before for before, after in zip(self._began, self._now(), strict=True))
        names = launches.keys() - _OF_THE_NEXT
        self.found.append({name: (launches[name], moved[name], seconds[name]) for name in names})

    def _now(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        counts = self.tracer.counts
        return Counter(counts.kernels), Counter(counts.moved), Counter(counts.seconds)


def _traced(rank: int, world: int) -> tuple[Table, Table]:
    """Ours and by hand: Qwen3-30B-A3B's layer on rank 0 of `ep_size=8`."""
    ours, by_hand = Watch(), Watch()
    made = TracedRank.__init__

    def make(self: TracedRank, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        ours.tracer = by_hand.tracer = self

    TracedRank.__init__ = make  # type: ignore[method-assign]

    def is_measured(module: nn.Module) -> bool:
        return ours.tracer is not None and ours.tracer.counts.on and any(True for _ in routers_in(module))

    def before(block: nn.Module, args: Any) -> None:
        if is_measured(block):
            ours.begin()

    def after(block: nn.Module, args: Any, result_BTD: Tensor) -> None:
        if not is_measured(block):
            return
        ours.end()
        result_BTD.register_hook(lambda grad: ours.begin())
        args[0].register_hook(lambda grad: ours.end())
        if not by_hand.found:
            with torch.no_grad():
                _written_by_hand(by_hand, block, args[0].detach().flatten(0, -2))

    nn.modules.module.register_module_forward_pre_hook(before)
    nn.modules.module.register_module_forward_hook(after)
    overrides = (*_fewer_layers("qwen3_moe_30b_ep8", _LAYERS), "parallelizer.activation_checkpointing=false")
    request = TraceRequest("qwen3_moe_30b_ep8", overrides, 8, 0, microbatches=_MICROBATCHES)
    trace(load(request), request)
    assert len(ours.found) == 2 * _LAYERS * _MICROBATCHES
    middle = ours.found[2 * _LAYERS : 4 * _LAYERS]  # forward through the layers and back
    return _sum([middle[1], middle[-2]]), _sum(by_hand.found)


def _sum(tables: list[Table]) -> Table:
    names = {name for table in tables for name in table}
    none = (0, 0, 0.0)
    return {
        name: tuple(sum(values) for values in zip(*(table.get(name, none) for table in tables), strict=True))
        for name in names
    }  # type: ignore[return-value]


def _written_by_hand(watch: Watch, block: nn.Module, hidden_TD: Tensor) -> None:
    (_, router), (experts,) = next(routers_in(block)), experts_modules(block)
    first, second = experts._parameters["gate_up_proj"], experts._parameters["down_proj"]
    first_LFD, second_LDI = (torch.empty(_local_shape(weight), **_like(hidden_TD)) for weight in (first, second))
    sum_LFD, sum_LDI = (torch.zeros(weight.shape, device=hidden_TD.device) for weight in (first_LFD, second_LDI))
    router_ED = torch.empty(router._parameters["weight"].shape, **_like(hidden_TD))
    grad_TD = torch.empty_like(hidden_TD)
    group, choices = dist.group.WORLD, router.top_k

    def fused(name: str, read: list[Tensor], *written: Tensor) -> Any:
        watch.tracer.ran_as_one(name, read, written)
        return written[0] if len(written) == 1 else written

    def exchanged(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        result = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(result, rows, receive, send, group=group)
        return result

    def new(*shape: int, dtype: torch.dtype = hidden_TD.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden_TD.device)

    watch.begin()
    num_experts, num_local = len(router_ED), len(first_LFD)
    logits_TE = hidden_TD @ router_ED.t()
    weight_TK, index_TK = topk_router.route(logits_TE, None, choices, False, True, 1.0, False)
    expert_P, order_P = torch.sort(index_TK.flatten(), stable=True)
    token_P, place_P, sent = permute.permute_pairs(expert_P, order_P, choices, num_experts)
    each = [num_local] * dist.get_world_size()
    received_RL = exchanged(sent, each, each).view(-1, num_local)
    counts = torch.stack([sent, received_RL.flatten()]).tolist()
    send, receive = ([sum(row[i : i + num_local]) for i in range(0, num_experts, num_local)] for row in counts)
    order_N, place_N, _, ends_L = permute.permute_arrivals(received_RL, sum(receive))
    rows_ND = exchanged(hidden_TD.index_select(0, token_P), send, receive).index_select(0, order_N)
    inner_NF = grouped_mm(rows_ND, first_LFD.transpose(-2, -1), offs=ends_L)
    gated_NI = fused("gate", [inner_NF], new(len(inner_NF), inner_NF.shape[1] // 2))
    result_ND = grouped_mm(gated_NI, second_LDI.transpose(-2, -1), offs=ends_L)
    result_PD = exchanged(result_ND.index_select(0, place_N), receive, send)
    fused("sum over experts", [result_PD, place_P, weight_TK], new(*hidden_TD.shape))

    grad_ND = exchanged(grad_TD.index_select(0, token_P), send, receive).index_select(0, order_N)
    weight_N = exchanged(weight_TK.flatten().index_select(0, order_P), send, receive).index_select(0, order_N)
    of_gated_NI = grouped_mm(grad_ND, second_LDI, offs=ends_L)
    read = [inner_NF, of_gated_NI, weight_N]
    weighted_NI, of_inner_NF, of_weight_N = fused(
        "backward of gate", read, new(*gated_NI.shape), new(*inner_NF.shape), new(len(inner_NF))
    )
    sum_LDI.add_(grouped_mm(grad_ND.t(), weighted_NI, offs=ends_L))
    sum_LFD.add_(grouped_mm(of_inner_NF.t(), rows_ND, offs=ends_L))
    of_rows_ND = grouped_mm(of_inner_NF, first_LFD, offs=ends_L)
    of_rows_PD = exchanged(of_rows_ND.index_select(0, place_N), receive, send)
    of_weight_P = exchanged(of_weight_N.index_select(0, place_N), receive, send)
    of_logits_TE = fused("router, backward", [of_weight_P, place_P, logits_TE, index_TK], new(*logits_TE.shape))
    of_hidden_TD = fused("sum of gradients", [of_rows_PD, place_P], new(*hidden_TD.shape))
    torch.addmm(of_hidden_TD, of_logits_TE, router_ED)
    torch.mm(of_logits_TE.t(), hidden_TD)
    watch.end()


def _local_shape(weight: Any) -> torch.Size:
    return (weight.to_local() if hasattr(weight, "to_local") else weight).shape


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _page(ours: Table, by_hand: Table) -> str:
    """A line for each operator, and one for all."""
    lines = [f"{'operator':34} {'ours':>5} {'MB':>7} {'ms':>7}   {'hand':>5} {'MB':>7} {'ms':>7}"]
    names = sorted({*ours, *by_hand}, key=lambda name: -ours.get(name, by_hand.get(name, (0, 0, 0.0)))[2])
    rows = [(name, ours.get(name, (0, 0, 0.0)), by_hand.get(name, (0, 0, 0.0))) for name in names]
    total = [tuple(sum(values) for values in zip(*(row[i] for row in rows), strict=True)) for i in (1, 2)]
    for name, mine, theirs in [*rows, ("all", *total)]:
        cells = [f"{n:5d} {size / 1e6:7.1f} {seconds * 1e3:7.3f}" for n, size, seconds in (mine, theirs)]
        lines.append(f"{name:34} " + "   ".join(cells))
    return "\n".join(lines)


@pytest.mark.slow
def test_a_layer_of_experts_costs_at_most_1_3_times_one_written_by_hand() -> None:
    ours, by_hand = launch(_traced, 1, timeout=400, process_group=False)
    page = _page(ours, by_hand)
    if "AUTOMODEL_PRINT" in os.environ:
        print("\n" + page)
    for what in range(3):  # launches, bytes, seconds
        mine, theirs = (sum(row[what] for row in table.values()) for table in (ours, by_hand))
        assert mine <= _MOST * theirs, page
