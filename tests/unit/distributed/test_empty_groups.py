"""Gradients of experts without tokens, on a device that leaves them unwritten: torch's operator, replaced by one that
does so on the CPU, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from automodel_cli.distributed import empty_groups
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import parameters_of
from automodel_cli.models import transformers_compat
from tests import tiny
from tests.dist.harness import launch

CPU = torch.device("cpu")
_library = torch.library.Library("aten", "IMPL")


def _unwritten(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: None = None) -> Tensor:
    """`aten::_grouped_mm`: nan in the sums of empty groups."""
    assert offs is not None
    spans = list(pairwise([0, *offs.tolist()]))
    if b.dim() == 3:
        return torch.cat([a[start:end] @ b[i] for i, (start, end) in enumerate(spans)])
    sums = [a[:, start:end] @ b[start:end] for start, end in spans]
    return torch.stack(
        [total if end > start else total * torch.nan for total, (start, end) in zip(sums, spans, strict=True)]
    )


def test_a_trial_finds_what_is_not_zero_in_empty_groups() -> None:
    def leaves(first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
        return _unwritten(first_NI.t(), second_NO, ends_L)

    assert empty_groups._tried(leaves, CPU, torch.float32)
    assert not empty_groups._tried(empty_groups._of_torch, CPU, torch.float32)


def _inputs() -> tuple[torch.nn.Module, list[Tensor], Tensor]:
    """Experts, tokens and routing weights, and the experts chosen: never the last one."""
    experts = experts_modules(tiny.build_hf("qwen3_moe"))[0]
    generator = torch.Generator().manual_seed(5)
    hidden_TD = torch.randn(20, experts.gate_up_proj.shape[2], generator=generator)  # type: ignore[index, union-attr]
    chosen = [torch.randperm(int(experts.num_experts) - 1, generator=generator)[:2] for _ in hidden_TD]  # type: ignore
    return experts, [hidden_TD, torch.rand(20, 2, generator=generator)], torch.stack(chosen)


def _gradients(run: Callable[[Tensor, Tensor, Tensor], Tensor], experts: torch.nn.Module, given: list[Tensor],
               index_TK: Tensor) -> list[Tensor]:  # fmt: skip
    leaves = [x.detach().requires_grad_() for x in given]
    return list(torch.autograd.grad(run(leaves[0], index_TK, leaves[1]).sum(), [*leaves, *parameters_of(experts)]))


def _worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Not a number where one of them is not."""
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(got, want, strict=True)]).max())


def _on_such_a_device(rank: int, world: int) -> dict[str, float]:
    """Largest relative difference of gradients from those of a loop over experts, by who multiplies."""
    experts, given, index_TK = _inputs()
    loop = type(experts).forward.__wrapped__
    want = _gradients(lambda *args: loop(experts, *args), experts, given, index_TK)
    experts.config._experts_implementation = "grouped_mm"  # type: ignore[union-attr]
    _library.impl("_grouped_mm", _unwritten, "CPU", allow_override=True)
    own = GatedExperts.of(experts, int(experts.num_experts), None)  # type: ignore[arg-type]
    found: dict[str, float] = {}

    def ours(hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        assert own is not None
        return own(hidden_TD, index_TK, weight_TK, parameters_of(experts))

    def measure(when: str) -> None:
        found[f"ours {when}"] = _worst(_gradients(ours, experts, given, index_TK), want)
        found[f"the library's {when}"] = _worst(_gradients(experts, experts, given, index_TK), want)

    measure("before")
    empty_groups.leaves_garbage = lambda *_, **__: True  # type: ignore[assignment]
    transformers_compat.clear_empty_experts()
    measure("after")
    return found


def test_experts_without_tokens_get_zeros_where_a_device_leaves_them_unwritten() -> None:
    found = launch(_on_such_a_device, 1, process_group=False)
    assert all(value != value for name, value in found.items() if name.endswith("before")), found
    assert all(value < 1e-5 for name, value in found.items() if name.endswith("after")), found


def test_a_cpu_is_not_tried() -> None:
    first_NI, second_NO = torch.ones(4, 16), torch.ones(4, 8)
    ends_L = torch.tensor([0, 4], dtype=torch.int32)
    got = empty_groups.weight_gradient(first_NI, second_NO, ends_L)
    assert torch.equal(got, grouped_mm(first_NI.t(), second_NO, offs=ends_L))
    assert not empty_groups._results
