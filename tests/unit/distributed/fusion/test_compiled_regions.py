"""Glue found in real layers and compiled, against the same layers as written."""

from __future__ import annotations

import copy
import functools
import logging
import shutil
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import parameters_of
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.fusion.compiled_regions import Compiled, FusibleRegion
from automodel_cli.distributed.fusion.patterns import fuse_layers
from automodel_cli.distributed.fusion.region_kernels import as_one
from automodel_cli.training.monitors.recompile_monitor import CompileWatch
from tests import tiny
from tests.errors import raises
from tests.marks import nightly

CPU = torch.device("cpu")


def gradients(model: nn.Module, rows: int, tokens: int) -> dict[str, Tensor]:
    ids_BT = torch.arange(rows * tokens).view(rows, tokens) % 40
    model.zero_grad()
    model(input_ids=ids_BT, use_cache=False).logits.square().mean().backward()
    return tiny.gradients(model)


# Of each layer; norms of queries and keys beside those of the layer (Qwen 3), an angle for two dims (GPT-OSS).
FAMILIES = {
    "llama": {"norm LlamaRMSNorm": 2, "gate SiLUActivation": 1, "rotary": 1},
    "gpt_oss": {"norm GptOssRMSNorm": 2, "rotary": 1},
    "qwen3": {"norm Qwen3RMSNorm": 4, "gate SiLUActivation": 1, "rotary": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "llama", *nightly("qwen3")])
def test_regions_are_found_compute_the_same_and_are_compiled_for_any_number_of_tokens_at_once(family: str) -> None:
    plain = tiny.build_hf(family)
    model = copy.deepcopy(plain)
    fuser = Compiled("aot_eager", CPU, torch.float32)
    fuse_layers(model, fuser)
    layers = model.config.num_hidden_layers
    in_layers = {name: count * layers for name, count in FAMILIES[family].items()}
    last = {name: 1 for name in in_layers if name.startswith("norm")}
    assert fuser.compiled == Counter(in_layers) + Counter(last), str(fuser)
    for step, (rows, tokens) in enumerate([(2, 12), (2, 17), (3, 9)]):
        before = len(compiled_regions.compilations)
        error = tiny.gradient_error(gradients(plain, rows, tokens), gradients(model, rows, tokens))
        assert error < 1e-6
        assert step == 0 or len(compiled_regions.compilations) == before, compiled_regions.compilations[before:]


class BothInOne(nn.Module):
    """As in Phi-3: gate and up are halves of one product, in this order or the other."""

    def __init__(self, order: int):
        super().__init__()
        self.both, self.down, self.act, self.order = nn.Linear(8, 12), nn.Linear(6, 8), nn.SiLU(), order

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)[:: self.order]
        return self.down(up * self.act(gate))


def test_gates_in_one_product_are_found_and_other_formulas_left_alone() -> None:
    fuser = Compiled("aot_eager", CPU, torch.float32)
    model = nn.ModuleList([BothInOne(1), BothInOne(-1)])
    x = torch.randn(2, 5, 8)
    want = [part(x) for part in model]
    fuse_layers(model, fuser)
    assert fuser.compiled == {"gate SiLU": 1} and "forward" not in vars(model[1])
    assert all(torch.allclose(part(x), result, atol=1e-6) for part, result in zip(model, want, strict=True))


@pytest.mark.slow
def test_the_regions_of_experts_compute_the_same_compiled() -> None:
    experts = next(m for m in tiny.build_hf("gpt_oss").modules() if hasattr(m, "is_transposed"))
    fuser = Compiled("aot_eager", CPU, torch.float32)
    plain, compiled = (GatedExperts.of(experts, experts.num_experts, None, f) for f in (None, fuser))
    assert sum(fuser.compiled.values()) == 4 and not fuser.rejected
    generator = torch.Generator().manual_seed(0)
    for tokens in (7, 20):
        given = [torch.randn(tokens, experts.config.hidden_size, generator=generator), torch.rand(tokens, 2)]
        given = [t.requires_grad_() for t in (*given, *(p.detach().clone() for p in parameters_of(experts)))]
        index_TK = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(tokens)])
        found = []
        for run in (plain, compiled):
            result = run(given[0], index_TK, given[1], given[2:])
            found.append([result, *torch.autograd.grad(result.square().sum(), given)])
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found, strict=True))


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = torch.cat((-q[..., q.shape[-1] // 2 :], q[..., : q.shape[-1] // 2]), dim=-1)
    return q * cos + half * sin, k * cos


def _renamed(forward):
    """As `deprecate_kwarg` of transformers, which wraps the forwards of attention since 5.24."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **{"q" if name == "query" else name: value for name, value in kwargs.items()})

    return wrapper


class Decorated(nn.Module):
    @_renamed
    @torch.no_grad()
    def forward(self, q: Tensor, scale: float = 2.0) -> Tensor:
        angle = torch.ones(1, q.shape[2], q.shape[3])
        return apply_rotary(q, q, angle.cos(), angle.sin())[0] * scale


def test_rotary_embeddings_of_decorated_forwards_are_found_and_the_decorators_remain() -> None:
    fuser, module = Compiled("aot_eager", CPU, torch.float32), Decorated()
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    want = module(query=q)
    fuse_layers(module, fuser)
    assert fuser.compiled == {"rotary": 1} and "forward" in vars(module)
    got = module(query=q)
    assert torch.allclose(got, want, atol=1e-6) and not got.requires_grad


def _scaled(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + 1


SCALED = FusibleRegion("scaled", _scaled, (0,), lambda rows: (torch.ones(rows, 4),))


@torch._dynamo.register_backend(name="off_by_one")
def _off_by_one(graph, inputs):
    return lambda *args: tuple(result + 1 for result in graph(*args))


@torch._dynamo.register_backend(name="broken")
def _broken(graph, inputs):
    raise RuntimeError("no such device")


@pytest.mark.parametrize(("backend", "reason"), [("off_by_one", "differs by 1.0e"), ("broken", "no such device")])
def test_what_does_not_compile_or_computes_otherwise_stays_as_written(backend: str, reason: str) -> None:
    fuser = Compiled(backend, CPU, torch.float32)
    assert fuser(SCALED) is None
    fuser.settle(by_name=False)
    assert reason in fuser.rejected["scaled"] and "not scaled" in compiled_regions.last()
    keys = ("parallelizer.enable_compile", "parallelizer.compile_backend")
    with raises(ConfigError, "kernel_unavailable", keys=keys, values=("scaled", backend)):
        fuser.settle(by_name=True)


@torch._dynamo.register_backend(name="narrow")
def _narrow(graph, inputs):
    if inputs[-1].shape[-1] > 4:
        raise RuntimeError("too wide")
    return graph


def test_a_region_that_fails_later_runs_as_written_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Compiled("narrow", CPU, torch.float32)(SCALED)
    assert run is not None
    with caplog.at_level(logging.WARNING):
        for rows in (3, 5):
            x = torch.randn(rows, 6)
            assert torch.equal(run(x), _scaled(x))
    (record,) = [record for record in caplog.records if getattr(record, "code", None) == "kernel_unavailable"]
    assert "scaled" in record.getMessage() and "too wide" in record.getMessage()


def test_lower_precision_may_differ_by_rounding_only() -> None:
    assert Compiled("aot_eager", CPU, torch.bfloat16)(SCALED) is not None


def test_steps_that_compile_later_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch()
    found = []
    with caplog.at_level(logging.WARNING):
        for graphs in (["norm"], [], [], ["norm", "rotary", "norm"], ["norm"]):
            watch.begin([])
            compiled_regions.compilations.extend(graphs)
            found.append(float(watch.finish()["compiled_graphs"]))
    assert found == [1, 0, 0, 3, 1]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("[recompilation] ") and "step 4" in message and "norm (2), rotary (1)" in message


def test_tensors_without_values_are_counted_as_one_kernel_forward_and_one_for_each_kind_of_gradient() -> None:
    model = tiny.build_hf("llama").to("meta")
    launched: Counter[str] = Counter()
    fuse_layers(model, as_one(torch.no_grad, lambda name, read, written: launched.update([name])))
    ids_BT, mask = torch.zeros(1, 8, dtype=torch.int64, device="meta"), torch.zeros(1, 1, 8, 8, device="meta")
    model(input_ids=ids_BT, attention_mask=mask, use_cache=False).logits.sum().backward()
    layers = model.config.num_hidden_layers
    norms, name = 2 * layers + 1, "norm LlamaRMSNorm"
    others = {key: layers for kind in ("rotary", "gate SiLUActivation") for key in (kind, f"{kind}, backward")}
    assert launched == {name: norms, f"{name}, backward": 2 * norms, **others}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for a CPU")
def test_inductor_makes_no_more_kernels_than_are_counted() -> None:
    found: dict[str, FusibleRegion] = {}
    fuse_layers(tiny.build_hf("llama"), lambda region: found.setdefault(region.name, region) and None)
    experts = next(m for m in tiny.build_hf("qwen3_moe").modules() if hasattr(m, "is_transposed"))
    biased = next(m for m in tiny.build_hf("gpt_oss").modules() if hasattr(m, "is_transposed"))
    for some in (experts, biased):
        GatedExperts.of(some, some.num_experts, None, lambda region: found.setdefault(region.name, region) and None)
    assert len(found) == 9
    for region in found.values():
        counted: list[str] = []
        grad = region.kept is not None
        args = [compiled_regions._to_device(arg, CPU, torch.float32, grad=grad) for arg in region.sample(64)]
        tally = as_one(nullcontext, lambda name, read, written, counted=counted: counted.append(name))(region)
        with torch.set_grad_enabled(grad):
            compiled_regions._with_gradients(tally, args)
            run = compiled_regions._function_of(region, "inductor")
            _, codes = run_and_get_code(lambda run=run, args=args: compiled_regions._with_gradients(run, args))
        assert 1 <= sum(code.count("async_compile.cpp") for code in codes) <= len(counted), (region.name, counted)
