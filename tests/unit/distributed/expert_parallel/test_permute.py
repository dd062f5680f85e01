"""The integers of a dispatch against lists written out: as defined, and by Triton kernels in its interpreter on the CPU
(skipped where triton is not installed), which compile for an H100 without one."""

from __future__ import annotations

from tests import interpreter  # isort: skip  # before anything that imports triton

import sys

import pytest
import torch
from torch import Tensor

from automodel_cli.distributed.expert_parallel import permute

WAYS = ["as defined", pytest.param("by Triton", marks=interpreter.needs_triton)]


def _functions(way: str):
    if way == "as defined":
        return permute.permute_pairs, permute.permute_arrivals
    from automodel_cli.distributed.expert_parallel import permute_triton

    return permute_triton.pairs, permute_triton.arrivals


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "index_TK", [[[4, 1], [1, 0], [4, 5]], [[2]], [[0, 1]] * 1500], ids=["a few", "one", "several blocks"]
)
def test_pairs_know_their_tokens_their_places_and_how_many_their_experts_have(index_TK: list, way: str) -> None:
    num_experts, choices = 7, len(index_TK[0])
    index_P = [expert for chosen in index_TK for expert in chosen]
    order = sorted(range(len(index_P)), key=lambda pair: (index_P[pair], pair))
    expert_P = torch.tensor([index_P[pair] for pair in order])
    token_P, place_P, count_E = _functions(way)[0](expert_P, torch.tensor(order), choices, num_experts)
    assert token_P.tolist() == [pair // choices for pair in order]
    assert place_P.tolist() == [order.index(pair) for pair in range(len(order))]
    assert count_E.tolist() == [index_P.count(expert) for expert in range(num_experts)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "received", [[[2, 0, 3], [0, 0, 0], [1, 4, 0]], [[1]], [[1500, 2], [3, 1100]]], ids=["a few", "one", "many"]
)
def test_arrivals_are_put_in_the_order_of_their_experts(received: list, way: str) -> None:
    rows = [(expert, rank) for rank, counts in enumerate(received) for expert, n in enumerate(counts) for _ in range(n)]
    order = sorted(range(len(rows)), key=lambda row: (rows[row], row))
    ends = [sum(counts[i] for counts in received for i in range(expert + 1)) for expert in range(len(received[0]))]
    order_N, place_N, expert_N, ends_L = _functions(way)[1](torch.tensor(received), len(rows))
    assert order_N.tolist() == order
    assert place_N[order_N].tolist() == list(range(len(rows)))
    assert expert_N.tolist() == [rows[row][0] for row in order]
    assert ends_L.tolist() == ends and ends_L.dtype == torch.int32


@interpreter.needs_triton
def test_the_comparison_that_decides_on_a_gpu_passes_here_and_sees_a_wrong_kernel(monkeypatch) -> None:
    from automodel_cli.distributed.expert_parallel import permute_triton

    assert permute.agree(torch.device("cpu"))
    right = permute_triton.arrivals

    def wrong(received_RL: Tensor, num_rows: int) -> tuple[Tensor, ...]:
        order_N, place_N, *rest = right(received_RL, num_rows)
        return place_N, order_N, *rest

    monkeypatch.setattr(permute_triton, "arrivals", wrong)
    assert not permute.agree(torch.device("cpu"))


@interpreter.needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_both_kernels_compile_for_an_h100_without_spilling_registers() -> None:
    kinds = dict.fromkeys(["expert", "order", "token", "place", "count", "received"], "*i64") | {"ends": "*i32"}
    kinds |= dict.fromkeys(["num_pairs", "num_experts", "choices", "num_local"], "i32")
    fixed = {"halvings": 16, "groups": 128, "padded": 128, "block": 1024}
    interpreter.compile_for_an_h100(
        "automodel_cli.distributed.expert_parallel.permute_triton", ["_pairs", "_arrivals"], kinds, fixed
    )
