"""Experts as one function, without an exchange, against the family's own loop in float64; and what is not theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automodel_cli.distributed.activation_checkpointing.saved_results import SaveLevel, recomputed
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import parameters_of
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.planning.activation_memory import trace_activations
from tests import tiny

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def _experts(family: str) -> nn.Module:
    experts = experts_modules(tiny.build_hf(family))[0]
    for param in experts.parameters():
        nn.init.normal_(param, std=0.2, generator=torch.Generator().manual_seed(param.numel()))
    return experts


def _inputs(experts: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, of which none goes to the last expert."""
    generator = torch.Generator().manual_seed(5)
    width = experts.gate_up_proj.shape[1 if experts.is_transposed else 2]
    hidden_TD = torch.randn(20, width, generator=generator)
    index_TK = torch.stack([torch.randperm(experts.num_experts - 1, generator=generator)[:2] for _ in hidden_TD])
    return hidden_TD, index_TK, torch.rand(index_TK.shape, generator=generator)


def _gradients(result_TD: Tensor, given: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, result_TD.numel(), dtype=result_TD.dtype).view_as(result_TD)
    return [result_TD.detach(), *torch.autograd.grad((result_TD * weight).sum(), given)]


def _of_the_familys_loop(experts: nn.Module) -> list[Tensor]:
    hidden_TD, index_TK, weight_TK = _inputs(experts)
    hidden_TD, weight_TK = hidden_TD.double().requires_grad_(), weight_TK.double().requires_grad_()
    loop = type(experts).forward.__wrapped__
    double = experts.double()
    return _gradients(loop(double, hidden_TD, index_TK, weight_TK), [hidden_TD, weight_TK, *parameters_of(double)])


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_are_those_of_the_familys_loop(family: str) -> None:
    experts = _experts(family)
    known = GatedExperts.of(experts, int(experts.num_experts), None)
    assert known is not None
    hidden_TD, index_TK, weight_TK = _inputs(experts)
    given = [hidden_TD.requires_grad_(), weight_TK.requires_grad_(), *parameters_of(experts)]
    got = _gradients(known(hidden_TD, index_TK, weight_TK, given[2:]), given)
    for mine, want in zip(got, _of_the_familys_loop(experts), strict=True):
        assert (mine - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("most", list(SaveLevel))
def test_a_repeated_layer_gets_what_it_had_and_gives_the_same_gradients_twice(most: SaveLevel) -> None:
    """Twice, as zero-bubble schedules run it; the caller adds to the result in place, as some families do."""
    experts = _experts("gpt_oss")
    known = GatedExperts.of(experts, int(experts.num_experts), None)
    hidden_TD, index_TK, weight_TK = _inputs(experts)
    parameters = parameters_of(experts)
    given = [hidden_TD.requires_grad_(), weight_TK.requires_grad_(), *parameters]

    def layer(hidden_TD: Tensor, weight_TK: Tensor) -> Tensor:
        result_TD = known(hidden_TD, index_TK, weight_TK, parameters)
        result_TD += hidden_TD
        return result_TD.square()  # needs the result's values

    want = torch.autograd.grad(layer(hidden_TD, weight_TK).sum(), given)
    contexts = lambda: recomputed(most)  # noqa: E731
    result = checkpoint(layer, hidden_TD, weight_TK, use_reentrant=False, context_fn=contexts)
    for _ in range(2):
        got = torch.autograd.grad(result.sum(), given, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_split_backward_makes_each_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs first, weights later, as zero-bubble schedules do; each half makes only its own."""
    experts = _experts("gpt_oss")
    known = GatedExperts.of(experts, int(experts.num_experts), None)
    assert known is not None
    hidden_TD, index_TK, weight_TK = _inputs(experts)
    parameters = parameters_of(experts)
    inputs = [hidden_TD.requires_grad_(), weight_TK.requires_grad_()]
    result_TD = known(hidden_TD * 1, index_TK, weight_TK * 1, parameters)
    want = torch.autograd.grad(result_TD.square().sum(), [*inputs, *parameters], retain_graph=True)
    made: list[str] = []
    product, weight_gradient = known.product, known.weight_gradient
    monkeypatch.setattr(known, "product", lambda *args, **kw: (made.append("product"), product(*args, **kw))[1])
    monkeypatch.setattr(known, "weight_gradient", lambda *args: (made.append("weight"), weight_gradient(*args))[1])
    first = torch.autograd.grad(result_TD.square().sum(), inputs, retain_graph=True)
    assert made == ["product", "product"]
    second = torch.autograd.grad(result_TD.square().sum(), parameters)
    assert made[2:] == ["product", "weight", "weight"]
    assert all(torch.equal(a, b) for a, b in zip((*first, *second), want, strict=True))


class _Unlike:
    """Ways to be something else."""

    @staticmethod
    def another_gate(experts: nn.Module) -> None:
        experts.act_fn = nn.ReLU()
        experts._apply_gate = lambda x: torch.relu(x.chunk(2, -1)[0])

    @staticmethod
    def one_parameter_more(experts: nn.Module) -> None:
        experts.scale = nn.Parameter(torch.ones(len(experts.gate_up_proj)))

    @staticmethod
    def a_norm_behind(experts: nn.Module) -> None:
        experts.has_post_expert_norm = True

    @staticmethod
    def weights_of_another_layout(experts: nn.Module) -> None:
        experts.is_transposed = True

    @staticmethod
    def in_float64(experts: nn.Module) -> None:
        experts.double()


@pytest.mark.parametrize("change", [f for name, f in vars(_Unlike).items() if not name.startswith("_")])
def test_experts_that_compute_something_else_are_left_to_their_family(change) -> None:
    experts = _experts("qwen3_moe")
    change.__func__(experts)
    assert GatedExperts.of(experts, int(experts.num_experts), None) is None


def test_the_plan_counts_what_distributed_experts_keep() -> None:
    """T x K rows of D for the experts and their T results, with "selective" the first products too."""
    fields = tiny.tiny_fields("qwen3_moe")
    part = build_part(ModelConfig(config=fields))
    rows, seq_len = 2, 32
    pairs = rows * seq_len * fields["num_experts_per_tok"]
    tokens, width, inner = rows * seq_len, fields["hidden_size"], fields["moe_intermediate_size"]

    def layer(mode: bool | str, exchanges: bool) -> float:
        return trace_activations(
            part, torch.bfloat16, mode, rows=rows, seq_len=seq_len, ep=2 if exchanges else 1
        ).layers[-1]

    received = 2 * (pairs + tokens) * width
    assert layer("full", True) - layer("full", False) == received
    assert layer("minimal", True) == layer("full", False)
    assert layer("selective", True) - layer("selective", False) == received + 2 * pairs * 2 * inner
    assert layer(False, True) < layer(False, False)
