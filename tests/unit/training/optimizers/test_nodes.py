"""Optimizers against torch's own, parameter groups against a list written by hand, schedules against closed forms."""

from __future__ import annotations

import copy
import functools
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.optimizers import newton_schulz
from automodel_cli.training.optimizers.lr_scheduler import WSD, Constant, Cosine, Linear, build_lr_scheduler
from automodel_cli.training.optimizers.newton_schulz import orthogonalize
from automodel_cli.training.optimizers.nodes import AdamW, AdamW8bit, Muon
from automodel_cli.training.optimizers.param_groups import trainable
from automodel_cli.training.optimizers.schedule_plan import SchedulePlan, differ, extended_factor, factor_of
from tests.errors import raises


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 8, 6))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 6))


class Model(nn.Module):
    """Every kind of parameter that the rules speak about."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 8)
        self.proj = nn.Linear(8, 8)
        self.norm = RMSNorm(8)
        self.experts = Experts()
        self.lm_head = nn.Linear(8, 11, bias=False)

    def loss(self) -> torch.Tensor:
        x = self.proj(self.embed_tokens(torch.arange(5))) * self.norm.weight
        e = torch.einsum("td,edf->tf", x, self.experts.gate_up_proj) + self.experts.gate_up_proj_bias.sum(0)
        return self.lm_head(x).pow(2).sum() + e.pow(2).sum()


def names_by_decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[float, set[str]]:
    names = {param: name for name, param in model.named_parameters()}
    groups: dict[float, set[str]] = {}
    for group in optimizer.param_groups:
        groups.setdefault(group["weight_decay"], set()).update(names[p] for p in group["params"])
    return groups


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_weight_decay_acts_on_matrices_only():
    model = Model()
    assert names_by_decay(model, AdamW(lr=1e-3, weight_decay=0.5).build([model])) == {
        0.5: {"proj.weight", "experts.gate_up_proj", "lm_head.weight"},
        0.0: {"embed_tokens.weight", "proj.bias", "norm.weight", "experts.gate_up_proj_bias"},
    }


def test_a_tied_head_is_one_parameter_and_counts_as_the_embedding():
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight
    groups = names_by_decay(model, AdamW(lr=1e-3, weight_decay=0.5).build([model]))
    assert groups[0.5] == {"proj.weight", "experts.gate_up_proj"}
    assert len([item for item in trainable([model]) if item.param is model.lm_head.weight]) == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [AdamW, Muon], ids=["AdamW", "Muon"])
def test_embeddings_decay_where_asked_for_as_the_library_decays_them(tied: bool, make: Any):
    """The same parameters as transformers' Trainer, which every tool on top of it has."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, attention_bias=True, tie_word_embeddings=tied, **sizes))
    theirs = set(Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model))
    theirs &= {name for name, _ in model.named_parameters()}  # a tied head once
    assert "model.embed_tokens.weight" in theirs
    ours = names_by_decay(model, make(lr=1e-3, weight_decay=0.5, decay_embeddings=True).build([model]))[0.5]
    assert ours == theirs
    without = names_by_decay(model, make(lr=1e-3, weight_decay=0.5).build([model]))[0.5]
    assert without == theirs - {"model.embed_tokens.weight"}


def test_frozen_parameters_are_in_no_group():
    model = Model()
    model.requires_grad_(False)
    model.proj.weight.requires_grad_(True)
    optimizer = AdamW(lr=1e-3).build([model])
    assert [p for g in optimizer.param_groups for p in g["params"]] == [model.proj.weight]
    model.proj.weight.requires_grad_(False)
    with raises(ConfigError, "nothing_to_train", keys=("model",)):
        AdamW(lr=1e-3).build([model])


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "loop"])
def test_adamw_is_torchs_adamw(implementation):
    model, reference = Model(), Model()
    got = train(model, AdamW(lr=1e-2, weight_decay=0.1, implementation=implementation).build([model]))
    decayed = [reference.proj.weight, reference.experts.gate_up_proj, reference.lm_head.weight]
    rest = [p for p in reference.parameters() if not any(p is d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    want = train(reference, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-7)


def test_muon_is_torchs_muon_on_hidden_matrices_and_adamw_elsewhere():
    model, reference = Model(), Model()
    optimizer = Muon(lr=1e-2, weight_decay=0.1, adamw_lr=3e-3, implementation="loop", ns_dtype="bfloat16").build(
        [model]
    )
    got = train(model, optimizer)
    muon = torch.optim.Muon([reference.proj.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    decayed = [reference.experts.gate_up_proj, reference.lm_head.weight]
    rest = [reference.embed_tokens.weight, reference.proj.bias, reference.norm.weight]
    rest.append(reference.experts.gate_up_proj_bias)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), foreach=False)
    for _ in range(3):
        reference.loss().backward()
        muon.step()
        adamw.step()
        reference.zero_grad()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(got[name], param, rtol=1e-6, atol=1e-7, msg=name)
    assert set(optimizer.state[model.proj.weight]) == {"momentum_buffer"}
    assert set(optimizer.state[model.norm.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_muon_state_survives_the_state_dict():
    model, other = Model(), Model()
    first, second = Muon(lr=1e-2).build([model]), Muon(lr=1e-2).build([other])
    train(model, first, 2)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares the tensors otherwise
    got, want = train(other, second, 2), train(model, first, 2)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24)])
def test_newton_schulz_is_torchs_in_bfloat16_and_exact_in_float32(shape):
    update = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    param = nn.Parameter(torch.zeros(shape))
    param.grad = update.clone()
    torch.optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    assert torch.equal(-scale * orthogonalize(update, 5, torch.bfloat16).float(), param.detach())

    u, singular, v = torch.linalg.svd(update.double(), full_matrices=False)
    singular = singular / update.double().norm()
    for _ in range(5):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    exact = u @ singular.diag() @ v
    torch.testing.assert_close(orthogonalize(update, 5, torch.float32).double(), exact, rtol=0, atol=2e-6)
    assert (orthogonalize(update, 5, torch.bfloat16).double() - exact).abs().max() > 1e-4


def test_products_are_fp32_exactly_where_bfloat16_is_emulated(monkeypatch):
    """The dtype is measured, the state tells it, and a run that goes on keeps it whatever is measured then."""
    seconds = {torch.bfloat16: 10.0, torch.float32: 1.0}
    monkeypatch.setattr(newton_schulz, "_seconds", lambda dtype, size, device: seconds[dtype])
    model, exact, other = Model(), Model(), Model()
    slow = Muon(lr=1e-2).build([model])
    train(model, slow, 2)
    assert slow.state[model.proj.weight]["newton_schulz_float32"] == 1
    train(exact, Muon(lr=1e-2, ns_dtype="float32").build([exact]), 2)
    assert torch.equal(model.proj.weight, exact.proj.weight)

    seconds[torch.bfloat16] = 2.9  # noise is not emulation
    fast = Muon(lr=1e-2).build([other])
    train(other, fast, 2)
    assert set(fast.state[other.proj.weight]) == {"momentum_buffer"}
    assert not torch.equal(other.proj.weight, exact.proj.weight)

    other.load_state_dict(model.state_dict())
    fast.load_state_dict(copy.deepcopy(slow.state_dict()))
    assert torch.equal(train(other, fast, 2)["proj.weight"], train(model, slow, 2)["proj.weight"])


@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"lr": 1e-3, "betas": (0.9, 1.0)}, {"lr": 1e-3, "weight_decay": -1.0}]
)
def test_bad_numbers_name_their_field(options):
    key, value = list(options.items())[-1]
    value = list(value) if isinstance(value, tuple) else value
    with raises(ConfigError, "out_of_range", keys=(key,), values=(value,)) as caught:
        AdamW(**options)
    assert caught.value.fix.startswith("optimizer.")


def test_8bit_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr("automodel_cli.config.value_checks.find_spec", lambda name: None)
    with raises(ConfigError, "missing_package", keys=("library",), fix="pip install bitsandbytes"):
        AdamW8bit(lr=1e-3, library="bitsandbytes")


def rates(node, num_steps: int, peak: float = 2.0) -> list[float]:
    """The learning rate that each optimizer step of a run sees."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = build_lr_scheduler(node, optimizer, num_steps)
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_closed_form():
    got = rates(Cosine(warmup_steps=3, min_lr_ratio=0.1), 11)
    assert got[:3] == pytest.approx([2 * k / 4 for k in (1, 2, 3)])
    want = [2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8))) for k in range(8)]
    assert got[3:] == pytest.approx(want)
    assert got[3] == 2.0 and got[-1] > 0.2


def test_linear_and_constant_closed_form():
    assert rates(Linear(), 4) == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates(Linear(warmup_ratio=0.5), 4) == pytest.approx([2 / 3, 4 / 3, 2.0, 1.0])
    assert rates(Constant(warmup_steps=1), 4) == pytest.approx([1.0, 2.0, 2.0, 2.0])


def test_wsd_closed_form():
    got = rates(WSD(warmup_steps=1, decay_steps=4, min_lr_ratio=0.5), 10)
    assert got == pytest.approx([1.0, *[2.0] * 6, 1.75, 1.5, 1.25])
    sqrt = rates(WSD(decay="1-sqrt", decay_ratio=0.4), 10)
    assert sqrt[6:] == pytest.approx([2 * (1 - math.sqrt(k / 4)) for k in range(4)])


def test_torchs_own_scheduler_works_as_a_partial():
    got = rates(functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), 3)
    assert got == pytest.approx([2.0, 1.0, 0.5])


def test_schedule_state_is_the_step_and_a_new_peak_acts():
    def fresh(peak: float):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
        return optimizer, Cosine().build(optimizer, 10)

    _, first = fresh(1.0)
    for _ in range(4):
        first.step()
    optimizer, second = fresh(3.0)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == [3 * first.get_last_lr()[0]] == [optimizer.param_groups[0]["lr"]]


def extended(node, how: str, done: int = 8, num_steps: int = 16, before: int = 8) -> list[float]:
    """The rates of the steps after `done` of a run of `before` steps that goes on to `num_steps`."""
    plan = SchedulePlan.initial(before).extended(done, num_steps, how)
    plan = SchedulePlan.from_json(json.loads(json.dumps(plan.as_json())))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_lr_scheduler(node, optimizer, num_steps, extended_factor(node, plan))
    scheduler.load_state_dict({"step": done})
    found = []
    for _ in range(done, num_steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def cosine(step: int, length: int) -> float:
    return 2.0 * 0.5 * (1 + math.cos(math.pi * step / length))


def test_a_run_that_is_extended_continues_restarts_or_stretches_its_schedule():
    assert extended(Cosine(), "continue") == pytest.approx([cosine(7, 8)] * 8)
    assert extended(Cosine(), "restart") == pytest.approx([cosine(step, 8) for step in range(8)])
    assert extended(Cosine(), "stretch") == pytest.approx([cosine(step, 16) for step in range(8, 16)])
    in_the_middle = extended(Cosine(), "continue", done=5, num_steps=10)
    assert in_the_middle == pytest.approx([cosine(5, 8), cosine(6, 8), *[cosine(7, 8)] * 3])
    warm = [2.0 * (step + 1) / 3 for step in range(2)]
    assert extended(Linear(warmup_steps=2), "restart")[:3] == pytest.approx([*warm, 2.0])


def test_a_run_can_be_extended_more_than_once():
    plan = SchedulePlan.initial(4).extended(4, 10, "restart").extended(10, 12, "restart").extended(12, 14, "continue")
    factor = factor_of(Cosine(), plan)
    expected = [cosine(s, 4) for s in range(4)] + [cosine(s, 6) for s in range(6)] + [2.0, 1.0, 1.0, 1.0]
    assert [2 * factor(step) for step in range(14)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("node", "asks"), [(Cosine(), True), (WSD(), True), (Constant(), False), (Constant(warmup_steps=3), False)]
)
def test_a_finished_run_asks_where_the_choice_changes_a_rate(node, asks):
    plans = [SchedulePlan.initial(8).extended(8, 16, how) for how in ("continue", "stretch")]
    assert differ(node, *plans, 8) is asks


@pytest.mark.parametrize(
    ("make", "code", "key", "values"),
    [
        (lambda: Cosine(warmup_steps=3, warmup_ratio=0.1), "mutually_exclusive", "warmup_steps", (3, 0.1)),
        (lambda: Cosine(min_lr_ratio=1.5), "out_of_range", "min_lr_ratio", (1.5,)),
        (lambda: Cosine(warmup_steps=10).num_warmup_steps(10), "out_of_range", "warmup_steps", (10,)),
        (lambda: WSD(warmup_steps=8, decay_steps=9).num_warmup_steps(10), "out_of_range", "decay_steps", (8, 9, 10)),
    ],
)
def test_schedules_that_do_not_fit_are_rejected(make, code, key, values):
    with raises(ConfigError, code, keys=(key,), values=values):
        make()


def test_config_nodes_import_no_torch():
    names = ("config", "optimizers.nodes", "optimizers.lr_scheduler", "trackers")
    modules = ", ".join(f"automodel_cli.training.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
