"""Fused adapters compute what `peft` computes, in fewer kernels, and leave alone what they do not know."""

from __future__ import annotations

from collections import Counter

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.distributed.activation_checkpointing.apply import apply_activation_checkpointing
from automodel_cli.distributed.wgrad_fusion.linear import single_backward
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import fused as lora_fused
from automodel_cli.models.lora_config import LoRAConfig
from tests.tiny import build_hf

IDS = torch.arange(24).view(2, 12) * 5 % 160


def adapted(family: str, *, fused: bool = True, dtype: torch.dtype = torch.float32, **fields) -> torch.nn.Module:
    """The model of a family with adapters that are not zero."""
    model = build_hf(family)
    lora.inject(model, LoRAConfig(rank=4, alpha=6.0, **fields))
    generator = torch.Generator().manual_seed(3)
    for name, param in sorted(model.named_parameters()):
        if "lora_" in name:
            param.data = torch.randn(param.shape, generator=generator) * 0.1
    model.to(dtype).train()
    if fused:
        assert lora_fused.fuse_adapters(model) > 0
    return model


def gradients(model: torch.nn.Module, *, single: bool = True) -> dict[str, torch.Tensor]:
    with single_backward(single):
        loss = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[..., 7].mean()
        loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("single", [True, False], ids=["one backward", "split backward"])
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama", torch.float64, 1e-12),
        ("qwen2", torch.float64, 1e-12),  # biases
        ("gemma3_text", torch.float64, 1e-12),
        ("qwen3_moe", torch.float32, 5e-6),  # grouped products have no float64
        ("deepseek_v3", torch.float32, 5e-6),
    ],
)
def test_gradients_are_those_of_peft(family: str, dtype: torch.dtype, tolerance: float, single: bool):
    want = gradients(adapted(family, fused=False, dtype=dtype))
    got = gradients(adapted(family, dtype=dtype), single=single)
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = (got[name] - value).abs().max() / value.abs().max()
        assert error < tolerance, (name, error.item())


def test_the_values_without_gradients_are_those_of_training():
    model = adapted("llama")
    with single_backward():
        trained = model(input_ids=IDS, use_cache=False).logits.detach()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, trained)
    with lora.adapters_off([model]), torch.no_grad():
        off = model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(off, build_hf("llama")(input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_layers_have_the_same_gradients(mode: str, fields: dict[str, bool]):
    model = adapted("llama", fused=not fields, **fields)
    want = gradients(model)
    model.zero_grad()
    apply_activation_checkpointing(list(model.model.layers), mode)
    got = gradients(model)
    assert all(torch.equal(got[name], want[name]) for name in want)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_one_product_of_all_readers_and_no_kernel_for_the_scale():
    counts = []
    for fused in (False, True):
        model = adapted("llama", fused=fused)
        with Operators() as operators:
            gradients(model)
        counts.append(operators.count)
    before, after = counts
    layers = len(model.model.layers)
    products = [sum(count[name] for name in ("mm", "addmm", "addmm_")) for count in counts]
    # A: 7 to 4 in forward, twice as many in backward. Without an input gradient, the first layer has fewer.
    assert products[0] - products[1] >= 3 * 3 * (layers - 1)
    assert before["mul"] - after["mul"] >= 2 * 7 * (layers - 1)
    # Updates and input gradients: 7 updates, 3 + 3 sums for q, k, v and gate, up with their A, and o and down.
    assert before["add"] - after["add"] >= 7 * layers


@pytest.mark.parametrize("fields", [{"dropout": 0.5}], ids=["dropout"])
def test_what_is_not_known_computes_as_in_peft(fields):
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        results.append(gradients(adapted("llama", fused=fused, **fields)))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_variants_are_not_converted():
    model = build_hf("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]), model)
    assert lora_fused.fuse_adapters(model) == 0


def test_a_layer_of_a_group_may_have_an_input_of_its_own():
    model = adapted("llama")
    attention = model.model.layers[1].self_attn
    plain = adapted("llama", fused=False).model.layers[1].self_attn
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 5, 64, generator=generator) for _ in range(2))
    found = []
    for block in (attention, plain):
        one, two = (t.clone().requires_grad_() for t in (x, y))
        with single_backward():
            (block.q_proj(one).sum() + block.k_proj(two).square().sum() + block.v_proj(one).sum()).backward()
        found.append((one.grad, two.grad, block.k_proj.lora_A["default"].weight.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
