"""Preference losses by hand: published values, reference-free ones, judged responses, and settings that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.kto import KTO, reference_point_of
from tests.errors import raises
from tests.unit.objectives.test_vectors import rows_as_batch

# chosen: 0.8 over 4 tokens, rejected: -0.4 over 2 tokens, above a reference of 0 everywhere
CHOSEN, REJECTED = 0.8, -0.4
PUBLISHED = {
    "sigmoid": 0.634946,
    "sigmoid_norm": 0.673347,
    "hinge": 0.88,
    "ipo": 21.16,
    "robust": 0.619946,
    "exo_pair": 0.446785,
    "nca_pair": 1.357594,
    "bco_pair": 1.327294,
    "sppo_hard": 38.8,
    "apo_zero": 0.970012,
    "apo_down": 0.990025,
    "discopop": 0.865963,
}


def one_pair(chosen: float, rejected: float, *, reference: float = 0.0):
    """(log-probs, batch) of one pair: 4 chosen tokens and 2 rejected ones, after a prompt of one token."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    batch = rows_as_batch(
        mask,
        torch.ones(2),
        pairs_P2=torch.tensor([[0, 1]]),
        ref_logprobs_BT=torch.full((2, 5), reference, dtype=torch.float64),
    )
    logprobs_BT = torch.zeros(2, 5, dtype=torch.float64)
    logprobs_BT[0, :4], logprobs_BT[1, :2] = chosen / 4, rejected / 2
    return logprobs_BT.requires_grad_(), batch


def loss_of(objective: DPO, logprobs_BT: Tensor, batch) -> float:
    return (objective(HeadOutput(logprobs_BT), batch) / objective.weight(batch)).item()


@pytest.mark.parametrize(("loss", "value"), PUBLISHED.items())
def test_published_value(loss, value):
    smoothing = 0.1 if loss in ("robust", "exo_pair") else 0.0
    objective = DPO(loss=loss, beta=0.1, label_smoothing=smoothing)
    assert loss_of(objective, *one_pair(CHOSEN, REJECTED)) == pytest.approx(value, abs=1e-6)


def test_smoothed_sigmoid_mixes_both_labels():
    logits = 0.1 * (CHOSEN - REJECTED)
    want = -0.9 * math.log(1 / (1 + math.exp(-logits))) - 0.1 * math.log(1 / (1 + math.exp(logits)))
    got = loss_of(DPO(label_smoothing=0.1), *one_pair(CHOSEN, REJECTED))
    assert got == pytest.approx(want, abs=1e-9)


def test_simpo_compares_means_with_a_margin_and_no_reference():
    logprobs_BT, batch = one_pair(-2.0, -3.0)
    del batch.extra["ref_logprobs_BT"]
    logits = 2.0 * (-2.0 / 4 + 3.0 / 2) - 0.5
    want = math.log(1 + math.exp(-logits))
    assert loss_of(DPO(loss="simpo", beta=2.0), logprobs_BT, batch) == pytest.approx(want, abs=1e-9)


def test_orpo_is_nll_plus_log_odds_ratio():
    logprobs_BT, batch = one_pair(-2.0, -3.0)
    del batch.extra["ref_logprobs_BT"]
    c, r = -2.0 / 4, -3.0 / 2
    odds = (c - r) - (math.log(1 - math.exp(c)) - math.log(1 - math.exp(r)))
    want = 2.0 / 4 + 0.1 * math.log(1 + math.exp(-odds))
    objective = DPO(loss="orpo", beta=0.1, nll_weight=1.0, average_sft=True)
    assert loss_of(objective, logprobs_BT, batch) == pytest.approx(want, abs=1e-9)


def test_orpo_of_a_certain_response_is_finite():
    logprobs_BT, batch = one_pair(0.0, -3.0)
    objective = DPO(loss="orpo", nll_weight=1.0)
    objective(HeadOutput(logprobs_BT), batch).backward()
    assert logprobs_BT.grad.isfinite().all()


@pytest.mark.parametrize("objective", [DPO(), DPO(beta=0.5, average_log_probs=True), DPO(label_smoothing=0.2)])
def test_policy_equal_to_its_reference_gives_exactly_ln_2(objective):
    generator = torch.Generator().manual_seed(0)
    _, batch = one_pair(0, 0)
    logprobs_BT = -5 * torch.rand(2, 5, generator=generator)
    batch.extra["ref_logprobs_BT"] = logprobs_BT.clone()
    assert loss_of(objective, logprobs_BT, batch) == pytest.approx(math.log(2), abs=1e-7)


def test_a_pair_with_a_masked_side_counts_for_nothing():
    logprobs_BT, batch = one_pair(CHOSEN, REJECTED)
    batch.labels_BT[1] = -100
    objective = DPO(nll_weight=1.0)
    assert objective.weight(batch) == 0
    loss = objective(HeadOutput(logprobs_BT), batch)
    loss.backward()
    assert loss == 0 and not logprobs_BT.grad.any()
    assert objective.measure(HeadOutput(logprobs_BT.detach()), batch)["num_pairs"] == 0


def test_no_pairs_give_a_zero_that_can_be_differentiated():
    logprobs_BT, batch = one_pair(CHOSEN, REJECTED)
    batch.extra["pairs_P2"] = torch.zeros(0, 2, dtype=torch.int64)
    loss = DPO()(HeadOutput(logprobs_BT), batch)
    loss.backward()
    assert loss == 0 and not logprobs_BT.grad.any() and DPO().weight(batch) == 0


def judged(point: float | None):
    """Chosen and rejected as one desirable and one undesirable response."""
    logprobs_BT, batch = one_pair(CHOSEN, REJECTED)
    batch.extra["desirable_S"] = torch.tensor([1, 0])
    if point is not None:
        batch.extra["kl_baseline_1"] = torch.tensor([point])
    return logprobs_BT, batch


def test_kto_by_hand():
    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    logprobs_BT, batch = judged(0.3)
    objective = KTO(beta=0.5, desirable_weight=1.0, undesirable_weight=2.0)
    want = (1 - sigmoid(0.5 * (CHOSEN - 0.3))) + 2.0 * (1 - sigmoid(0.5 * (0.3 - REJECTED)))
    assert (objective(HeadOutput(logprobs_BT), batch) / objective.weight(batch)).item() == pytest.approx(
        want / 2, abs=1e-7
    )
    measured = objective.measure(HeadOutput(logprobs_BT.detach()), batch)
    assert measured["rewards_chosen"].item() == pytest.approx(CHOSEN)
    assert measured["rewards_rejected"].item() == pytest.approx(REJECTED)


def test_kto_without_a_reference_point_measures_from_zero():
    at_zero, from_zero = judged(0.0), judged(None)
    values = [
        objective(HeadOutput(logprobs_BT), batch).item()
        for objective, (logprobs_BT, batch) in ((KTO(), at_zero), (KTO(reference_point="zero"), from_zero))
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-9)


REFUSED = [
    ({"beta": -1}, "out_of_range", "beta"),
    ({"beta": 0, "loss": "ipo"}, "unsupported_combination", "beta"),
    ({"label_smoothing": 0.5}, "out_of_range", "label_smoothing"),
    ({"label_smoothing": 0.1, "loss": "hinge"}, "no_effect", "label_smoothing"),
    ({"loss": "exo_pair"}, "requires_setting", "label_smoothing"),
    ({"gamma": 0.5}, "no_effect", "gamma"),
    ({"tau": 0.5}, "no_effect", "tau"),
    ({"loss": "discopop", "tau": 0.0}, "out_of_range", "tau"),
    ({"preference_weight": 0.0}, "nothing_to_train", "preference_weight"),
    ({"nll_weight": -1.0}, "out_of_range", "nll_weight"),
    ({"loss": "orpo"}, "requires_setting", "nll_weight"),
    ({"loss": "simpo", "average_log_probs": False}, "unsupported_combination", "average_log_probs"),
    ({"average_sft": True}, "no_effect", "average_sft"),
]


@pytest.mark.parametrize(("options", "code", "key"), REFUSED, ids=str)
def test_refused(options, code, key):
    with raises(ConfigError, code, keys=(key,)):
        DPO(**options)


@pytest.mark.parametrize("name", ["beta", "desirable_weight", "undesirable_weight"])
def test_kto_refuses_zero(name):
    with raises(ConfigError, "out_of_range", keys=(name,), values=(0.0,)):
        KTO(**{name: 0.0})


# f'(t) of arXiv:2309.16240, table 1, at t = e^0.8 and e^-0.4
SLOPES = {
    ("forward_kl", None): lambda t: 1 - 1 / t,
    ("js", None): lambda t: math.log(2 * t / (t + 1)),
    ("alpha", 0.5): lambda t: (t**-0.5 - 1) / -0.5,
    ("alpha", 2.0): lambda t: t - 1,
}


@pytest.mark.parametrize(("name", "alpha"), SLOPES)
def test_a_divergence_replaces_the_log_ratio_by_its_slope(name, alpha):
    slope = SLOPES[name, alpha]
    logits = 0.1 * (slope(math.exp(CHOSEN)) - slope(math.exp(REJECTED)))
    got = loss_of(DPO(f_divergence=name, f_alpha=alpha), *one_pair(CHOSEN, REJECTED))
    assert got == pytest.approx(math.log(1 + math.exp(-logits)), abs=1e-7)


def test_tokens_beyond_the_shorter_response_weigh_less():
    """The chosen response has 4 tokens, the rejected one 2: of 0.8 its first half counts whole."""
    logits = 0.1 * (CHOSEN / 2 + 0.25 * CHOSEN / 2 - REJECTED)
    got = loss_of(DPO(ld_alpha=0.25), *one_pair(CHOSEN, REJECTED))
    assert got == pytest.approx(math.log(1 + math.exp(-logits)), abs=1e-7)
    assert loss_of(DPO(ld_alpha=1.0), *one_pair(CHOSEN, REJECTED)) == pytest.approx(PUBLISHED["sigmoid"], abs=1e-6)


def test_several_losses_add_up_with_their_weights_each_averaging_as_it_is_defined():
    objective = DPO(preference_weight=0.8, extra_losses={"bco_pair": 0.2, "ipo": 0.01}, nll_weight=0.5)
    want = 0.8 * PUBLISHED["sigmoid"] + 0.2 * PUBLISHED["bco_pair"] + 0.01 * PUBLISHED["ipo"] - 0.5 * CHOSEN
    assert loss_of(objective, *one_pair(CHOSEN, REJECTED)) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"f_divergence": "js", "loss": "ipo"}, "unsupported_combination"),
        ({"f_divergence": "alpha"}, "requires_setting"),
        ({"f_alpha": 0.5}, "requires_setting"),
        ({"ld_alpha": 1.5}, "out_of_range"),
        ({"extra_losses": {"orpo": 0.5}}, "unsupported_combination"),
        ({"extra_losses": {"sigmoid": 0.5}}, "invalid_choice"),
        ({"extra_losses": {"hinge": -1.0}}, "out_of_range"),
    ],
)
def test_additions_that_have_no_meaning_are_refused(options, code):
    with raises(ConfigError, code, keys=tuple(options)):
        DPO(**options)


@pytest.mark.parametrize(("total", "count", "want"), [(6.0, 3.0, 2.0), (-6.0, 3.0, 0.0), (0.0, 0.0, 0.0)])
def test_the_reference_point_of_a_step_is_no_less_than_zero(total, count, want):
    assert reference_point_of(torch.tensor([total, count])).tolist() == [want]
