"""Policy-gradient hand cases: each option once against numbers worked out on paper, and settings that are refused."""

from __future__ import annotations

import math

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.denominators import with_denominators
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.kl import kl_penalty
from tests.errors import raises
from tests.unit.objectives.test_vectors import judge, rows_as_batch

ONE_ROW = torch.tensor([[0, 1, 1, 1]])


def step_of(objective, now, *, mask=ONE_ROW, **columns):
    """(loss, gradient, metrics) of rows; columns by next token, one number stands for all."""
    now = torch.tensor([now], dtype=torch.float64) if not isinstance(now[0], list) else torch.tensor(now).double()
    names = {"advantages": 1.0, "old_logprobs": -1.0, "sampler_logprobs": -1.0, "ref_logprobs": -1.0, **columns}
    filled = {f"{name}_BT": torch.zeros(len(now), now.shape[1] + 1, dtype=torch.float64) for name in names}
    for name, values in names.items():
        filled[f"{name}_BT"][:, :-1] = torch.as_tensor(values, dtype=torch.float64)
    return judge(objective, rows_as_batch(mask, torch.ones(len(now)), **filled), now)


def test_reinforce():
    loss, grad, _ = step_of(GRPO(policy_loss="reinforce"), [-0.5, -1.0, -1.5], advantages=[1.0, -1.0, 2.0])
    assert loss == pytest.approx(0.8333, abs=1e-4)
    assert grad.tolist() == [pytest.approx([-1 / 3, 1 / 3, -2 / 3])]


def test_dual_clip():
    now = [math.log(0.5), 0.0, math.log(10.0)]
    loss, _, _ = step_of(GRPO(dual_clip_ratio=3.0), now, advantages=[1.0, -1.0, -4.0], old_logprobs=0.0)
    assert loss == pytest.approx((-0.5 + 1 + 12) / 3, abs=1e-9)


def test_clips_are_told_apart_by_side_where_the_gradient_ends():
    now = [math.log(q) for q in (0.5, 0.5, 2.0, 2.0, 4.0)]
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    given = {"advantages": [1.0, -1.0, 1.0, -1.0, -1.0], "old_logprobs": 0.0}
    _, grad, metrics = step_of(GRPO(dual_clip_ratio=3.0), now, mask=mask, **given)
    shares = {name: metrics[f"clip_{name}fraction"] for name in ("", "low_", "high_", "dual_")}
    assert shares == {"": 1.0, "low_": pytest.approx(0.2), "high_": pytest.approx(0.2), "dual_": pytest.approx(0.2)}
    assert (grad == 0).tolist() == [[False, True, True, False, True]]


def test_sequence_ratio_with_truncated_correction():
    objective = GRPO(
        importance_sampling_level="sequence",
        loss_aggregation="sequence",
        sampler_correction="truncate",
        sampler_correction_clip_max=0.8,
    )
    now = [-1.69315, -1.0, -0.59453]
    loss, _, metrics = step_of(objective, now, advantages=[1.0, -1.0, 2.0], sampler_logprobs=[-0.5, -1.5, -0.8])
    assert loss == pytest.approx(-0.4846, abs=1e-4)
    assert metrics["sampling_importance_ratio"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("kl_type", "free", "clamped"),
    [
        ("k1", [-1, 14, 29], [-1, 10, 10]),
        ("k2", [0.5, 98, 420.5], [0.5, 10, 10]),
        ("k3", [0.7183, 13.0, 28.0], [0.7183, 10, 10]),
    ],
)
def test_kl_estimates(kl_type, free, clamped):
    reference = torch.tensor([0.0, -15.0, -30.0], dtype=torch.float64)
    logprobs = torch.full_like(reference, -1.0)
    got = kl_penalty(logprobs, reference, kl_type, input_clamp=None, output_clamp=None)
    assert got.tolist() == pytest.approx(free, abs=1e-4)
    got = kl_penalty(logprobs, reference, kl_type, input_clamp=20.0, output_clamp=10.0)
    assert got.tolist() == pytest.approx(clamped, abs=1e-4)


def test_kl_gradient_is_that_of_the_sampled_estimate_and_zero_where_clamped():
    logprobs = torch.tensor([-3.0, -1.0], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprobs, torch.zeros(2, dtype=torch.float64), "k3", input_clamp=2.0)
    value.sum().backward()
    assert value.tolist() == pytest.approx([4.389056, 0.718282], abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0])


def test_without_the_score_term_the_gradient_is_that_of_the_value():
    """d = reference - policy = 1: k1 has gradient 1, k2 has -d, k3 has 1 - e^d."""
    for kl_type, slope in (("k1", 1.0), ("k2", -1.0), ("k3", 1 - math.e)):
        objective = GRPO(kl_coef=0.1, kl_type=kl_type, kl_score_term=False)
        with_term = GRPO(kl_coef=0.1, kl_type=kl_type)
        loss, grad, _ = step_of(objective, [-2.0] * 3, advantages=0.0)
        assert grad.tolist() == [pytest.approx([0.1 * slope / 3] * 3)]
        assert loss == pytest.approx(step_of(with_term, [-2.0] * 3, advantages=0.0)[0])


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_positive_responses_have_a_mean_of_their_own(aggregation):
    """Rewards 2, 0, 1 on responses of 3, 2 and 1 tokens: the NLL is divided by 3 + 1 tokens, not by all 6."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]])
    now = [[-1.0, -2.0, -3.0], [-9.0, -9.0, -9.0], [-4.0, -9.0, -9.0]]
    rewards = torch.tensor([[2.0], [0.0], [1.0]]).expand(3, 3)
    given = {"mask": mask, "advantages": 0.0, "rewards": rewards}
    loss, grad, metrics = step_of(GRPO(positive_nll_coef=0.5, loss_aggregation=aggregation), now, **given)
    assert loss == pytest.approx(0.5 * (1 + 2 + 3 + 4) / 4)
    assert grad.tolist() == [[-0.125] * 3, [0.0] * 3, [-0.125, 0.0, 0.0]]
    assert metrics["positive_nll_loss"] == pytest.approx(10 / 4)
    given["rewards"] = torch.zeros(3, 3)
    assert step_of(GRPO(positive_nll_coef=0.5, loss_aggregation=aggregation), now, **given)[0] == 0


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_mean_over_positive_responses_does_not_depend_on_microbatches(aggregation):
    """The second microbatch has no positive response."""
    objective = GRPO(positive_nll_coef=0.5, loss_aggregation=aggregation)
    mask, rewards = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]]), torch.tensor([2.0, 0.0, -1.0])
    columns = {f"{n}_BT": torch.zeros(3, 4) for n in ("advantages", "old_logprobs", "sampler_logprobs")}
    columns["rewards_BT"] = rewards[:, None].expand(3, 4)
    logprobs_BT = -torch.arange(12.0).view(3, 4)
    losses = []
    for rows in ([[0, 1, 2]], [[0], [1, 2]]):
        batches = [rows_as_batch(mask[r], torch.ones(len(r)), **{n: c[r] for n, c in columns.items()}) for r in rows]
        weight, batches = with_denominators(objective, batches)
        outputs = [HeadOutput(logprobs_BT[r], entropy_BT=torch.zeros(len(r), 4)) for r in rows]
        losses.append(sum(objective(o, b) for o, b in zip(outputs, batches, strict=True)).item() / weight.item())
    assert losses == pytest.approx([0.5 * (0 + 1 + 2) / 3] * 2)


def test_kl_in_the_loss():
    loss, _, metrics = step_of(GRPO(kl_coef=0.1), [0.0, -1.0, -2.0], advantages=0.0)
    assert loss == pytest.approx(0.0362, abs=1e-4)
    assert metrics["kl_penalty"] == pytest.approx(0.362, abs=1e-3)


def test_the_least_certain_tokens_have_the_policy_loss_and_every_token_the_kl():
    now, chosen = [0.0, -1.0, -2.0], {"uncertain": [1.0, 0.0, 1.0], "old_logprobs": [0.0, -1.0, -2.0]}
    loss, grad, metrics = step_of(GRPO(top_entropy_fraction=0.6), now, advantages=[1.0, -1.0, 2.0], **chosen)
    assert loss == pytest.approx(-(1 + 2) / 3) and grad.tolist() == [pytest.approx([-1 / 3, 0, -2 / 3])]
    assert metrics["top_entropy_fraction"] == pytest.approx(2 / 3)
    with_kl = step_of(GRPO(top_entropy_fraction=0.6, kl_coef=0.1), now, advantages=[1.0, -1.0, 2.0], **chosen)[0]
    assert with_kl - loss == pytest.approx(step_of(GRPO(kl_coef=0.1), now, advantages=0.0)[0])


def test_kl_in_the_reward_leaves_the_loss_alone_and_is_measured():
    loss, _, metrics = step_of(GRPO(kl_coef=0.1, kl_placement="reward"), [0.0, -1.0, -2.0], advantages=0.0)
    assert loss == 0
    assert metrics["kl_penalty"] == pytest.approx(0.362, abs=1e-3)


RATIOS = [[0.5, 3.0, 1.0], [2.0, 2.0, 1.5]]  # trainer / sampler of two responses; their products are 1.5 and 6


@pytest.mark.parametrize(
    ("correction", "level", "bounds", "want"),
    [
        ("importance", "token", {}, RATIOS),
        ("importance", "sequence", {}, [[1.5] * 3, [6.0] * 3]),
        ("truncate", "token", {"sampler_correction_clip_max": 2.0}, [[0.5, 2.0, 1.0], [2.0, 2.0, 1.5]]),
        ("truncate", "sequence", {"sampler_correction_clip_max": 2.0}, [[1.5] * 3, [2.0] * 3]),
        (
            "icepop",
            "token",
            {"sampler_correction_clip_min": 0.6, "sampler_correction_clip_max": 2.0},
            [[0.0, 0.0, 1.0], [2.0, 2.0, 1.5]],
        ),
        (
            "icepop",
            "sequence",
            {"sampler_correction_clip_min": 0.0, "sampler_correction_clip_max": 2.0},
            [[1.5] * 3, [0.0] * 3],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_weight_for_each_token_or_for_the_response(correction, level, bounds, want):
    """The gradient of each token is -A w / N: w = old / sampler, of the response the product over its tokens."""
    objective = GRPO(sampler_correction=correction, sampler_correction_level=level, **bounds)
    sampler = [[-1.0 - math.log(ratio) for ratio in of_row] for of_row in RATIOS]
    mask = ONE_ROW.expand(2, 4)
    _, grad, metrics = step_of(objective, [[-1.0] * 3] * 2, mask=mask, sampler_logprobs=sampler)
    assert (-6 * grad).tolist() == [pytest.approx(row) for row in want]
    flat = [weight for row in want for weight in row]
    assert metrics["sampling_importance_ratio"] == pytest.approx(sum(flat) / 6)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(3.0))


def test_a_product_that_overflows_is_clamped_and_an_impossible_token_counts_for_nothing():
    objective = GRPO(
        sampler_correction="truncate", sampler_correction_level="sequence", sampler_correction_clip_max=2.0
    )
    for sampler, want in ((-400.0, 2.0), ([-1.0, -math.inf, -1.0], 0.0)):
        _, grad, _ = step_of(objective, [-1.0, -1.0, -1.0], sampler_logprobs=sampler)
        assert (-3 * grad).tolist() == [pytest.approx([want] * 3)]


@pytest.mark.parametrize(("low", "mean", "outside"), [(None, 3.1 / 3, 1 / 3), (0.5, 3.5 / 3, 2 / 3)])
def test_truncated_weights(low, mean, outside):
    objective = GRPO(sampler_correction="truncate", sampler_correction_clip_max=2.0, sampler_correction_clip_min=low)
    sampler = [-1.0 - math.log(w) for w in (0.1, 1.0, 3.0)]
    _, _, metrics = step_of(objective, [-1.0, -1.0, -1.0], sampler_logprobs=sampler)
    assert metrics["sampling_importance_ratio"] == pytest.approx(mean)
    assert metrics["is_oob_ratio"] == pytest.approx(outside)


def test_icepop_drops_what_is_outside():
    objective = GRPO(sampler_correction="icepop", sampler_correction_clip_max=5.0, sampler_correction_clip_min=0.5)
    _, grad, metrics = step_of(objective, [-1.0, -1.0, -1.0], sampler_logprobs=[-1.0, -1.0, -3.5])
    assert metrics["is_oob_ratio"] == pytest.approx(1 / 3)
    assert grad.tolist() == [pytest.approx([-1 / 3, -1 / 3, 0.0])]


def test_sequence_mask_keeps_a_close_sequence_and_drops_an_impossible_token():
    objective = GRPO(
        sampler_correction="sequence_mask", sampler_correction_clip_max=1.002, sampler_correction_clip_min=0.999
    )
    loss, _, metrics = step_of(objective, [-1.0, -1.0, -1.0], sampler_logprobs=-1.0005)
    assert metrics["is_oob_ratio"] == 0 and loss == pytest.approx(-math.exp(5e-4))
    for correction in (
        objective,
        GRPO(sampler_correction="plain"),
        GRPO(sampler_correction="truncate", sampler_correction_clip_max=2.0),
    ):
        loss, grad, _ = step_of(correction, [-1.0, -1.0, -1.0], sampler_logprobs=[-1.0, float("-inf"), -1.0])
        assert math.isfinite(loss) and grad.isfinite().all()


def test_max_tokens_divides_by_a_constant():
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
    objective = GRPO(loss_aggregation="constant", normalization_length=10)
    loss, _, _ = step_of(objective, [[-1.0] * 3] * 2, mask=mask)
    assert loss == pytest.approx(-4 / (2 * 10))


@pytest.mark.parametrize("ratio", ["token", "on_policy"])
def test_same_weights_give_ratio_one_and_minus_the_mean_advantage(ratio):
    advantages = [0.3, -1.1, 2.0]
    loss, grad, metrics = step_of(GRPO(importance_sampling_level=ratio), [-1.0, -1.0, -1.0], advantages=advantages)
    assert loss == pytest.approx(-sum(advantages) / 3, abs=1e-9)
    assert grad.tolist() == [pytest.approx([-a / 3 for a in advantages])]
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1
    assert metrics["gen_kl_error"] == 0 and metrics["token_mult_prob_error"] == 1


ONLY_UPDATE = {
    "grpo": GRPO(),
    "dual clip": GRPO(dual_clip_ratio=3.0),
    "gspo": GRPO(importance_sampling_level="sequence", loss_aggregation="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": GRPO(policy_loss="cispo", clip_low=1.0, clip_high=4.0),
    "reinforce": GRPO(policy_loss="reinforce"),
    "truncate": GRPO(sampler_correction="truncate", sampler_correction_clip_max=2.0, kl_coef=0.1),
    "sequence mask": GRPO(
        sampler_correction="sequence_mask", sampler_correction_clip_max=1.2, sampler_correction_clip_min=0.8
    ),
    "max tokens": GRPO(loss_aggregation="constant", normalization_length=7, positive_nll_coef=0.1),
}


@pytest.mark.parametrize("objective", ONLY_UPDATE.values(), ids=ONLY_UPDATE)
def test_the_only_update_of_a_rollout_needs_no_old_logprobs(objective):
    """Measured before it they are its own: loss, gradient and metrics are equal to the bit."""
    random = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    now = -torch.rand(3, 4, generator=random, dtype=torch.float64) * 3
    columns = {
        "advantages": torch.randn(3, 4, generator=random),
        "sampler_logprobs": now + 0.2 * torch.randn(3, 4, generator=random),
        "ref_logprobs": now + torch.randn(3, 4, generator=random),
        "rewards": torch.ones(3, 4),
    }
    filled = {f"{name}_BT": torch.nn.functional.pad(v.double(), (0, 1)) for name, v in columns.items()}
    old = {"old_logprobs_BT": torch.nn.functional.pad(now, (0, 1))}
    given = judge(objective, rows_as_batch(mask, torch.ones(3), **filled, **old), now)
    left_out = judge(objective, rows_as_batch(mask, torch.ones(3), **filled), now)
    assert left_out[0] == given[0] and torch.equal(left_out[1], given[1]) and left_out[1].any()
    assert left_out[2] == given[2]


def test_all_masked_is_zero_and_has_a_gradient_of_zero():
    batch = rows_as_batch(
        torch.zeros(1, 4),
        torch.ones(1),
        **{f"{n}_BT": torch.ones(1, 4) for n in ("advantages", "old_logprobs", "sampler_logprobs")},
    )
    logprobs_BT = torch.zeros(1, 4, requires_grad=True)
    for objective in (GRPO(), GRPO(importance_sampling_level="sequence", loss_aggregation="sequence")):
        loss = objective(HeadOutput(logprobs_BT, entropy_BT=logprobs_BT), batch)
        loss.backward()
        assert loss == 0 and not logprobs_BT.grad.any() and objective.weight(batch) == 0
    metrics = GRPO().measure(HeadOutput(logprobs_BT, entropy_BT=logprobs_BT).detach(), batch)
    assert metrics["probs_ratio_min"] == math.inf and metrics["probs_ratio_max"] == -math.inf


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({}, (0.5 + 1.5 + 1.0 + 4.0) / 4),
        ({"loss_aggregation": "sequence"}, (3.0 / 3 + 4.0 / 1) / 2),
        ({"loss_aggregation": "constant", "normalization_length": 8}, 7.0 / (2 * 8)),
    ],
)
def test_the_entropy_bonus_is_divided_like_the_loss(options, mean):
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    columns = {f"{n}_BT": torch.zeros(2, 5) for n in ("advantages", "old_logprobs", "sampler_logprobs")}
    batch = rows_as_batch(mask, torch.ones(2), **columns)
    entropy_BT = torch.tensor([[0.5, 1.5, 1.0, 9.0, 9.0], [4.0, 9.0, 9.0, 9.0, 9.0]], requires_grad=True)
    objective = GRPO(entropy_coef=0.25, **options)
    output = HeadOutput(torch.zeros(2, 5), entropy_BT=entropy_BT)
    loss = objective(output, batch) / objective.weight(batch)
    loss.backward()
    assert loss.item() == pytest.approx(-0.25 * mean)
    assert entropy_BT.grad is not None and (entropy_BT.grad < 0).sum() == 4
    assert objective.measure(output.detach(), batch)["entropy"] == 7.0


def test_a_kl_in_the_reward_is_clamped_as_the_config_says():
    now, reference = torch.tensor([-40.0, -1.0]), torch.tensor([-1.0, -1.5])  # k1: -39 and 0.5
    for clamps, taken in (
        ({}, [-10.0, 0.5]),
        ({"kl_output_clamp": None}, [-20.0, 0.5]),
        ({"kl_input_clamp": None, "kl_output_clamp": None}, [-39.0, 0.5]),
        ({"kl_output_clamp": 0.25}, [-0.25, 0.25]),
    ):
        kl = GRPO(kl_coef=0.5, kl_placement="reward", kl_type="k1", **clamps).reward_kl
        assert kl is not None and kl.of(now, reference).tolist() == [0.5 * value for value in taken]


REFUSED = [
    ({"clip_low": 1.5}, "out_of_range", "clip_low"),
    ({"clip_high": -0.1}, "out_of_range", "clip_high"),
    ({"dual_clip_ratio": 1.0}, "out_of_range", "dual_clip_ratio"),
    ({"dual_clip_ratio": 3.0, "policy_loss": "cispo"}, "no_effect", "dual_clip_ratio"),
    ({"dual_clip_ratio": 3.0, "importance_sampling_level": "on_policy"}, "no_effect", "dual_clip_ratio"),
    ({"policy_loss": "reinforce", "clip_high": 0.28}, "no_effect", "clip_high"),
    ({"policy_loss": "sapo", "clip_low": 0.1}, "no_effect", "clip_low"),
    ({"importance_sampling_level": "on_policy", "clip_high": 0.28}, "no_effect", "clip_high"),
    ({"importance_sampling_level": "sequence"}, "requires_setting", "loss_aggregation"),
    (
        {"importance_sampling_level": "sequence", "policy_loss": "reinforce", "loss_aggregation": "sequence"},
        "unsupported_combination",
        "policy_loss",
    ),
    (
        {"policy_loss": "cispo", "importance_sampling_level": "on_policy"},
        "unsupported_combination",
        "importance_sampling_level",
    ),
    ({"policy_loss": "cispo", "loss_aggregation": "sequence"}, "unsupported_combination", "loss_aggregation"),
    ({"loss_aggregation": "constant"}, "requires_setting", "normalization_length"),
    ({"normalization_length": 5}, "requires_setting", "normalization_length"),
    ({"loss_aggregation": "constant", "normalization_length": 0}, "out_of_range", "normalization_length"),
    ({"entropy_coef": -0.1}, "out_of_range", "entropy_coef"),
    ({"kl_coef": -1.0}, "out_of_range", "kl_coef"),
    ({"kl_input_clamp": 0.0}, "out_of_range", "kl_input_clamp"),
    ({"kl_placement": "reward"}, "no_effect", "kl_placement"),
    ({"kl_type": "k1"}, "no_effect", "kl_type"),
    ({"kl_output_clamp": None}, "no_effect", "kl_output_clamp"),
    ({"kl_bias_correction": True}, "no_effect", "kl_bias_correction"),
    ({"kl_coef": 0.1, "kl_placement": "reward", "kl_score_term": False}, "no_effect", "kl_score_term"),
    ({"sapo_positive": 0.0}, "out_of_range", "sapo_positive"),
    ({"sapo_negative": 2.0}, "no_effect", "sapo_negative"),
    ({"sampler_correction_clip_max": 2.0}, "no_effect", "sampler_correction_clip_max"),
    ({"sampler_correction": "truncate"}, "requires_setting", "sampler_correction_clip_max"),
    ({"sampler_correction_level": "sequence"}, "no_effect", "sampler_correction_level"),
    (
        {"sampler_correction": "icepop", "sampler_correction_clip_max": 2.0},
        "requires_setting",
        "sampler_correction_clip_min",
    ),
    (
        {
            "sampler_correction": "truncate",
            "sampler_correction_clip_max": 1.0,
            "sampler_correction_clip_min": 2.0,
        },
        "out_of_range",
        "sampler_correction_clip_min",
    ),
    (
        {
            "importance_sampling_level": "sequence",
            "loss_aggregation": "sequence",
            "sampler_correction": "sequence_mask",
            "sampler_correction_clip_max": 2.0,
            "sampler_correction_clip_min": 0.5,
        },
        "unsupported_combination",
        "sampler_correction",
    ),
    ({"positive_nll_coef": -1.0}, "out_of_range", "positive_nll_coef"),
    ({"top_entropy_fraction": 1.0}, "out_of_range", "top_entropy_fraction"),
]


@pytest.mark.parametrize(("options", "code", "key"), REFUSED, ids=str)
def test_refused(options, code, key):
    with raises(ConfigError, code, keys=(key,)):
        GRPO(**options)


def test_the_gate_of_sapo_is_1_at_its_middle_and_closes_faster_below_an_advantage_of_0():
    """-A sigmoid(t (q - 1)) 4 / t; its slope is that of q at q = 1 (arXiv:2511.20347)."""
    now = [math.log(2.0), math.log(0.5), 0.0]
    advantages = [1.0, -2.0, 3.0]
    loss, grad, _ = step_of(GRPO(policy_loss="sapo"), now, advantages=advantages, old_logprobs=0.0)

    def gate(q, t):
        return 4 / t / (1 + math.exp(-t * (q - 1)))

    want = -(1 * gate(2.0, 1.0) - 2 * gate(0.5, 1.05) + 3 * gate(1.0, 1.0)) / 3
    assert loss == pytest.approx(want, rel=1e-6)
    assert grad[0, 2].item() == pytest.approx(-3 / 3)


def test_with_one_advantage_gspo_by_token_is_gspo():
    now, old = [-0.5, -1.2, -2.0], [-0.6, -1.0, -1.9]
    for advantage in (1.5, -1.5):
        found = [
            step_of(
                GRPO(importance_sampling_level=ratio, loss_aggregation="sequence"),
                now,
                old_logprobs=old,
                advantages=advantage,
            )
            for ratio in ("sequence", "sequence_token")
        ]
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-12) and torch.allclose(found[0][1], found[1][1])


def test_gspo_by_token_gives_each_token_the_gradient_of_its_own_advantage():
    now, old = [-0.5, -1.2, -2.0], [-0.6, -1.0, -1.9]
    advantages = [1.0, -2.0, 0.5]
    objective = GRPO(
        importance_sampling_level="sequence_token", loss_aggregation="sequence", clip_low=0.9, clip_high=0.9
    )
    loss, grad, _ = step_of(objective, now, old_logprobs=old, advantages=advantages)
    ratio = math.exp(sum(n - o for n, o in zip(now, old, strict=True)) / 3)
    assert loss == pytest.approx(-ratio * sum(advantages) / 3)
    assert grad[0].tolist() == pytest.approx([-ratio * advantage / 3 for advantage in advantages])
