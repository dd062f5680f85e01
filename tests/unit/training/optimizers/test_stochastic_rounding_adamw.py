"""AdamW with moments of their own dtype: against torch's in float32, and the statistics of rounding at random."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.fusion.compiled_regions import Compiled, FusibleRegion
from automodel_cli.training.optimizers import stochastic_rounding_adamw
from automodel_cli.training.optimizers.build import refuse_float16_moments
from automodel_cli.training.optimizers.nodes import AdamW, Muon
from automodel_cli.training.optimizers.stochastic_rounding_adamw import round_bf16_stochastically, update
from automodel_cli.training.torch_compat import step_if_finite
from tests.errors import raises

CPU = torch.device("cpu")
KEYWORDS = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def trained(node, dtype=torch.float32, steps=5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).to(dtype)
    optimizer = node.build([model])
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.sin(torch.arange(param.numel()) * (step + number + 1.0)).view_as(param).to(dtype)
        optimizer.step()
    return model, optimizer


def test_in_float32_it_is_torchs_own_adamw():
    want, theirs = trained(AdamW(**KEYWORDS))
    got, ours = trained(AdamW(**KEYWORDS, state_dtype="float32"))
    for a, b in zip(want.parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(ours.state[b][key], theirs.state[a][key], rtol=1e-5, atol=1e-8)


def test_moments_have_their_own_dtype_also_after_loading():
    model, optimizer = trained(AdamW(**KEYWORDS, state_dtype="bfloat16"))
    again, resumed = trained(AdamW(**KEYWORDS, state_dtype="bfloat16"), steps=0)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for of in ((model, optimizer), (again, resumed)):
        for param in of[0].parameters():
            param.grad = torch.ones_like(param)
        of[1].step()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
        assert resumed.state[b]["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(resumed.state[b]["exp_avg_sq"], optimizer.state[a]["exp_avg_sq"])


@pytest.mark.parametrize(
    "node", [AdamW(**KEYWORDS), Muon(lr=0.01, adamw_names=("",), adamw_betas=(0.8, 0.99), adamw_eps=1e-6)]
)
def test_float16_parameters_have_float32_moments_also_after_loading(node):
    """Gradients of 1e-5, whose squares are 0 in float16, beside AdamW in float64 and with a stop in the middle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).half()
    exact = copy.deepcopy(model).double()
    decay = node.weight_decay
    weights, biases = ([p for p in exact.parameters() if p.ndim == d] for d in (2, 1))
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    optimizer = node.build([model])
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = node.build([model])
            optimizer.load_state_dict(state)
        for number, (ours, theirs) in enumerate(zip(model.parameters(), exact.parameters(), strict=True)):
            ours.grad = (1e-5 * torch.sin(torch.arange(ours.numel()) * (step + number + 1.0))).view_as(ours).half()
            theirs.grad = ours.grad.double()
        optimizer.step()
        reference.step()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=6 * 2.0**-11 * 0.5)  # rounded 6 times below 1
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[ours][key].dtype == torch.float32
            torch.testing.assert_close(
                optimizer.state[ours][key].double(), reference.state[theirs][key], rtol=1e-5, atol=0
            )


def test_moments_of_their_own_dtype_are_not_rounded_when_they_are_loaded():
    """torch's own method casts them to bfloat16, that of the parameters."""
    node = AdamW(**KEYWORDS, state_dtype="float32")
    _, optimizer = trained(node, torch.bfloat16)
    _, resumed = trained(node, torch.bfloat16, steps=0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("section", "fix"),
    [
        (AdamW(lr=1e-3, implementation="foreach"), "optimizer.implementation=auto"),
        (functools.partial(torch.optim.NAdam, lr=1e-3), "model.dtype=float32"),
    ],
)
def test_optimizers_that_would_keep_float16_moments_are_refused(section, fix):
    with raises(ConfigError, "unsupported_combination", keys=("model.dtype",), values=("float16",), fix=fix):
        refuse_float16_moments(section)
    refuse_float16_moments(AdamW(lr=1e-3))
    refuse_float16_moments(functools.partial(torch.optim.SGD, lr=1e-3))


def test_numbers_are_rounded_to_a_neighbour_with_the_mean_kept():
    """Mean and variance of n draws between neighbours a distance u apart: value, and u^2 p (1 - p) / n."""
    many, distance = 20_000, 2.0**-7  # of bfloat16 numbers from 1 to 2
    for part in (0.1, 0.5, 0.93):
        value = 1.0 + part * distance
        for signed in (value, -value):
            drawn = round_bf16_stochastically(torch.full((many,), signed), torch.tensor(7.0), torch.tensor(3)).double()
            assert set(drawn.abs().tolist()) == {1.0, 1.0 + distance}
            deviation = distance * math.sqrt(part * (1 - part) / many)
            assert abs(drawn.mean().item() - torch.tensor(signed).item()) < 4 * deviation
    exact = torch.tensor([0.0, 1.5, -3.0, float("inf")])
    assert torch.equal(round_bf16_stochastically(exact, torch.tensor(1.0), torch.tensor(0)).float(), exact)


def test_an_element_is_rounded_anew_in_each_step_and_parameter():
    value = torch.full((64,), 1.0 + 2.0**-8)  # half way
    draws = [
        round_bf16_stochastically(value, torch.tensor(float(s)), torch.tensor(k)) for s in range(100) for k in range(10)
    ]
    ups = (torch.stack(draws) > 1).double()
    assert (ups.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(len(draws))
    assert torch.corrcoef(ups.T).fill_diagonal_(0).abs().max() < 6 / math.sqrt(len(draws))
    assert torch.equal(draws[3], round_bf16_stochastically(value, torch.tensor(0.0), torch.tensor(3)))


def moved(rounds: bool) -> float:
    """How far bfloat16 ones have moved on average after 50 steps of 1e-4, a fortieth of the distance of two numbers."""
    param, one = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    mean, square, step = torch.ones(4096), torch.ones(4096), torch.tensor(1e6)
    for _ in range(50):
        lr, zero = torch.tensor(1e-4), torch.zeros(())
        update(param, one, mean, square, step, lr, torch.tensor(1), zero, 0.9, 0.99, 0.0, 0.0, rounds)
    return 1 - param.double().mean().item()


def test_small_updates_add_up_only_where_rounding_is_random():
    """Of 50 steps the mean is 50e-4, with a deviation below sqrt(50 x 4096) x 2^-8 / 4096."""
    assert moved(rounds=False) == 0
    assert moved(rounds=True) == pytest.approx(50e-4, abs=5 * math.sqrt(50 * 4096) * 2.0**-8 / 4096)


def test_a_refused_step_changes_nothing():
    node = AdamW(**KEYWORDS, state_dtype="bfloat16", stochastic_rounding=True)
    model, optimizer = trained(node, torch.bfloat16)
    before = copy.deepcopy((model.state_dict(), [*optimizer.state.values()]))
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    assert step_if_finite(torch.tensor(True), optimizer, CPU)
    after = (model.state_dict(), [*optimizer.state.values()])
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(torch.equal(a[key], b[key]) for a, b in zip(before[1], after[1], strict=True) for key in a)
    assert step_if_finite(torch.tensor(False), optimizer, CPU)
    assert all(param.isnan().all() for param in model.parameters())


def test_the_optimizer_that_rounds_compiles_once():
    region = FusibleRegion("AdamW", update, None, stochastic_rounding_adamw._sample, by_element=True)
    fuser, before = Compiled("aot_eager", CPU, torch.float32), len(compiled_regions.compilations)
    assert fuser(region) is not None, fuser.rejected
    assert len(compiled_regions.compilations) == before + 1, "one graph for tensors of all sizes"


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({"state_dtype": "float16"}, "invalid_choice", "state_dtype"),
        ({"state_dtype": "bfloat16", "implementation": "foreach"}, "unsupported_combination", "implementation"),
    ],
)
def test_unsupported_options_are_rejected(options, code, key):
    with raises(ConfigError, code, keys=(key,), values=(options[key],)):
        AdamW(lr=1e-3, **options)


def test_rounding_at_random_needs_something_to_round():
    with raises(ConfigError, "no_effect", keys=("stochastic_rounding",)):
        AdamW(lr=1e-3, stochastic_rounding=True).build([nn.Linear(2, 2)])
