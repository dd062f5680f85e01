"""What one operator call costs in a dry run's roofline, against closed forms and published measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_grouped_mm
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.dryrun.fake_device import fake_tensor_compat
from automodel_cli.dryrun.fake_device.collectives import Collectives
from automodel_cli.dryrun.fake_device.fake_cuda import CUDA
from automodel_cli.planning import cost_model, hardware
from automodel_cli.planning.cost_model import OperatorCall
from automodel_cli.planning.efficiency import Efficiency
from automodel_cli.planning.hardware import GPUS
from automodel_cli.planning.simulated_clock import Clock
from tests.dist.harness import launch

N = 1 << 20
ALONE = replace(GPUS["h100"], rates=Efficiency())
"""A kernel that runs alone, as others measured it."""


WIDE, NARROW, INDEX, BITS8 = torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn
Shape = tuple[tuple[int, ...], torch.dtype]


def _adamw(param: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
    torch._fused_adamw_(
        [param], [grad], [first], [second], [], [], lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


MOVED: dict[str, tuple[Callable[..., Any], tuple[Shape, ...], int]] = {
    "sum": (lambda a, b: a + b, (((N,), NARROW),) * 2, 6 * N),
    "sum in place": (lambda a, b: a.add_(b), (((N,), WIDE), ((N,), NARROW)), (4 + 2 + 4) * N),
    "scaled in place": (lambda a: a.mul_(2), (((N,), WIDE),), 8 * N),
    "copy": (lambda a, b: a.copy_(b), (((N,), WIDE), ((N,), NARROW)), (2 + 4) * N),
    "zeros": (lambda a: a.zero_(), (((N,), WIDE),), 4 * N),
    "zeros like": (lambda a: torch.zeros_like(a, dtype=WIDE), (((N,), NARROW),), 4 * N),
    "expanded": (lambda a, b: a + b.expand(1024, 1024), (((1024, 1024), NARROW), ((1, 1024), NARROW)), 4 * N + 2048),
    "looked up": (lambda a, i: a[i], (((8 * N,), NARROW), ((N,), INDEX)), 4 * N),
    "scattered": (lambda a, i, b: a.index_add_(0, i, b), (((8 * N,), WIDE), ((N,), INDEX), ((N,), WIDE)), 12 * N),
    "four numbers read and three written": (_adamw, (((N,), WIDE),) * 4, 7 * 4 * N),
}
FACTORS = (((4096, 7168), NARROW), ((7168, 4096), NARROW), ((4096, 4096), NARROW))
PRODUCTS: dict[str, Callable[..., Any]] = {
    "new": lambda a, b, c: a @ b,
    "out": lambda a, b, c: torch.mm(a, b, out=c),
    "added in place": lambda a, b, c: c.addmm_(a, b),
    "added to out": lambda a, b, c: torch.addmm(c, a, b, out=c),
}
MEASURED: dict[str, tuple[int, int, int, float]] = {
    "4096 x 576": (4096, 7168, 576, 46e-6),
    "4096 x 7168": (4096, 576, 7168, 53e-6),
    "squares": (2048, 2048, 2048, 32e-6),
    "adds 4096 x 4096": (4096, 7168, 4096, 308e-6),
    "adds 7168 x 4096": (7168, 2048, 4096, 207e-6),
    "adds 24576 x 4096": (24576, 1536, 4096, 585e-6),
    "adds 576 x 4096": (576, 7168, 4096, 52e-6),
    "adds 256 x 4096": (256, 7168, 4096, 36e-6),
}
"""Rows, inner and columns of single products, and the seconds that cuBLAS was measured to take: `product_speed` says by
whom. Those that add do so to float32."""
GROUPED = [(8192, 16, 8192, 5120, 1.31e-3), (32768, 32, 2048, 6144, 1.45e-3), (65536, 32, 6144, 2048, 2.77e-3)]
"""Rows, groups, columns, width, and the seconds that somebody measured (`gpus.py` says who)."""
SQUARE = (((4096, 4096), WIDE),) * 2


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(a, b.transpose(1, 2), offs=ends)


def _grouped_of_8_bits(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    scales, by_row = (torch.empty(len(a), device=CUDA), torch.empty(b.shape[:2], device=CUDA)), ScalingType.RowWise
    given = (a, b.transpose(1, 2), scales[0], by_row, scales[1], by_row)
    return scaled_grouped_mm(*given, offs=ends, output_dtype=torch.bfloat16)


def _added(a: Tensor, b: Tensor, total: Tensor) -> None:
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _calls() -> dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]]:
    """Each launches one kernel."""
    found = {name: (call, shapes) for name, (call, shapes, _) in MOVED.items()}
    found |= {name: (call, FACTORS) for name, call in PRODUCTS.items()}
    for name, (rows, inner, columns, _) in MEASURED.items():
        factors = ((rows, inner), NARROW), ((inner, columns), NARROW)
        adds = name.startswith("adds")
        found[name] = (_added, (*factors, ((rows, columns), WIDE))) if adds else (lambda a, b: a @ b, factors)
    for rows, groups, columns, width, _ in GROUPED:
        shapes = (((rows, width), NARROW), ((groups, columns, width), NARROW), ((groups,), torch.int32))
        found[f"grouped {rows}"] = (_grouped, shapes)
    rows, groups, columns, width, _ = GROUPED[0]
    shapes = (((rows, width), BITS8), ((groups, columns, width), BITS8), ((groups,), torch.int32))
    found["grouped of 8 bits"] = (_grouped_of_8_bits, shapes)
    return {**found, "float32": (lambda a, b: a @ b, SQUARE)}


class _Seen(TorchDispatchMode):
    """(FLOPs, bytes, seconds) of every launch."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[float, int, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and cost_model.launches(call := OperatorCall(func, args, kwargs or {})):
            kernel = cost_model.kernel(call, tensors_in(out))
            self.costs.append((kernel.flops, int(kernel.bytes), kernel.seconds(ALONE)[1]))
        return out


def _measure(rank: int, world: int) -> dict[str, list[tuple[float, int, float]]]:
    """Fake tensors change torch for the whole process."""
    found = {}
    with fake_tensor_compat.install_fake_cuda(CUDA):
        for name, (call, shapes) in _calls().items():
            tensors = [torch.empty(shape, dtype=dtype, device=CUDA) for shape, dtype in shapes]
            with _Seen() as seen:
                call(*tensors)
            found[name] = seen.costs
    return found


@pytest.fixture(scope="module")
def costs() -> dict[str, tuple[float, int, float]]:
    found = launch(_measure, 1, timeout=120, process_group=False)
    assert {name: len(launches) for name, launches in found.items()} == dict.fromkeys(found, 1)
    return {name: launches[0] for name, launches in found.items()}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_are_those_that_have_to_be_read_and_written(name: str, costs: Any) -> None:
    _, moved, took = costs[name]
    expected = MOVED[name][2]
    assert moved == expected
    assert took == pytest.approx(max(expected / (0.85 * 3.35e12), 3e-6))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_same_flops_in_every_form(name: str, costs: Any) -> None:
    work, _, took = costs[name]
    assert work == 2 * 4096 * 7168 * 4096
    assert took == pytest.approx(work / (0.75 * 989e12), rel=0.01)


@pytest.mark.parametrize("name", MEASURED)
def test_a_product_takes_as_long_as_cublas_was_measured_to_take(name: str, costs: Any) -> None:
    """Where the measured one is faster than 75% of the peak, which is never granted, it may take an eighth longer."""
    _, _, _, measured = MEASURED[name]
    assert 0.83 * measured <= costs[name][2] <= 1.13 * measured


def test_a_product_in_float32_is_granted_what_cublas_does_without_tensor_cores(costs: Any) -> None:
    """51.9 TFLOP/s on squares of 4096."""
    work, _, took = costs["float32"]
    assert work / took == pytest.approx(51.9e12, rel=0.01)


@pytest.mark.parametrize(("rows", "measured"), [(rows, measured) for rows, *_, measured in GROUPED])
def test_a_grouped_product_takes_as_long_as_it_was_measured_to_take(rows: int, measured: float, costs: Any) -> None:
    assert costs[f"grouped {rows}"][2] == pytest.approx(measured, rel=0.03)


def test_attention_is_granted_more_in_longer_documents_and_more_forward_than_backward() -> None:
    shares = [hardware.attention_efficiency(tokens, backward=False) for tokens in (100, 512, 700, 1024, 5000, 100_000)]
    assert shares == sorted(shares)
    assert shares[1] == pytest.approx(191 / 989, abs=1e-3) and shares[-1] == pytest.approx(335 / 989, abs=1e-3)
    assert all(
        hardware.attention_efficiency(t, backward=True) < hardware.attention_efficiency(t, backward=False)
        for t in (512, 3000, 20_000)
    )


def test_a_grouped_product_of_8_bits_takes_as_long_as_it_was_measured_to_take(costs: Any) -> None:
    """0.885 ms for the 1.31 of bfloat16, by the same hand."""
    work, _, took = costs["grouped of 8 bits"]
    assert work == 2 * 8192 * 8192 * 5120 and took == pytest.approx(0.885e-3, rel=0.03)


@pytest.mark.parametrize(("causal", "pairs"), [(True, 6 * 10 - 6 * 6 / 2 + 4 * 4 / 2), (False, 6 * 10 + 4 * 4)])
def test_attention_counts_the_pairs_that_meet(causal: bool, pairs: float) -> None:
    """Two segments of 6 and 4 queries that see 10 and 4 keys: 4 pairs of products of 64 numbers and 8 heads forward,
    and two and a half times as many backward."""
    q, k = (torch.empty(n, 8, 64, dtype=NARROW, device="meta") for n in (10, 14))
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 6, 10], [0, 10, 14])]
    forward = (q, k, k, *bounds, 6, 10, 0.0, causal, False)
    backward = (q, q, k, k, q, q, *bounds, 6, 10, 0.0, causal, q, q)
    found = cost_model.flops(OperatorCall(torch.ops.aten._flash_attention_forward.default, forward), Tensor.tolist)
    assert found == 4 * pairs * 8 * 64
    again = cost_model.flops(OperatorCall(torch.ops.aten._flash_attention_backward.default, backward), Tensor.tolist)
    assert again == 2.5 * found


def test_rings_between_machines_use_the_cards_of_all_their_gpus_and_exchanges_each_its_own() -> None:
    """Two machines of 8; 45 GB of a tensor at 450 GB/s inside and 50 outside, at 70%."""
    links, size = hardware.Links(450e9, 50e9, 8), 45e9
    start = hardware.COLLECTIVE_SECONDS

    def seconds(kind: str, *ranks: int) -> float:
        return (links.seconds(kind, size, ranks) - start) * Efficiency().node

    inside, both, one_of_each = range(8), range(16), (0, 8)
    assert seconds("allgather_base", *inside) == pytest.approx(7 / 8 * 45 / 450)
    assert seconds("allgather_base", *both) == pytest.approx(15 / 16 * 45 / 400)
    assert seconds("allreduce", *both) == pytest.approx(2 * 15 / 16 * 45 / 400)
    assert seconds("reduce_scatter_base", *one_of_each) == pytest.approx(1 / 2 * 45 / 50)
    assert seconds("alltoall_base", *inside) == pytest.approx(7 / 8 * 45 / 450)
    assert seconds("alltoall_base", *both) == pytest.approx(8 / 16 * 45 / 50)
    assert seconds("send", 0, 1) == pytest.approx(45 / 450) and seconds("send", 7, 8) == pytest.approx(45 / 50)
    assert links.seconds("allreduce", size, (3,)) == 0


def test_a_ring_of_keys_takes_its_time_beside_what_is_computed() -> None:
    clock = Clock()
    collectives = Collectives(clock, hardware.Links(450e9))
    group: Any = SimpleNamespace(ranks=(0, 1))
    x = torch.empty(45_000_000, dtype=NARROW)
    sends = hardware.COLLECTIVE_SECONDS + 90e6 / 450e9 / Efficiency().node
    arrived = collectives.passed_on(lambda group, x: lambda: x)(group, x)
    clock.kernel("gemm", sends / 2)
    assert arrived() is x
    assert clock.now() == pytest.approx(Efficiency().host + sends)
