"""Objectives that read values or teachers, on ranks and in stages, against the library's model in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives.base import RewardKL
from automodel_cli.objectives.bradley_terry import BradleyTerry
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.ppo import PPO
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.rollout.advantages.token_advantages import TokenAdvantages
from automodel_cli.rollout.minibatches.entropy_mask import add_entropy_mask
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample
from tests import tiny
from tests.dist.harness import launch, launch_all
from tests.dist.test_grpo import given_samples, updates_of

pytestmark = pytest.mark.slow

OBJECTIVES = {
    "reward model": BradleyTerry(margin=True, center_rewards_coef=0.1),
    "distillation": Distillation(beta=0.3, top_k=4, nll_weight=0.3),
    "several preference losses": DPO(ld_alpha=0.3, extra_losses={"bco_pair": 0.5}, nll_weight=0.1),
    "gspo-token": GRPO(importance_sampling_level="sequence_token", loss_aggregation="sequence"),
    "least certain tokens": GRPO(top_entropy_fraction=0.2, kl_coef=0.4),
    "sapo": GRPO(policy_loss="sapo", loss_aggregation="sequence"),
    "ppo": PPO(kl_coef=0.1, value_coef=0.5),
}


def layouts(objective: Any) -> dict[str, Case]:
    """Each of two ranks."""
    fsdp2, stages = FSDP2Config(mp_policy=FP32), PipelineConfig(schedule="1f1b")
    rows = {
        "fsdp2": Case(MeshConfig(dp_size=2), fsdp2, objective=objective),
        "pp": Case(MeshConfig(dp_size=1, pp_size=2), fsdp2, stages, objective=objective),
        "cp": Case(MeshConfig(dp_size=1, cp_size=2), fsdp2, objective=objective),
    }
    return {name: replace(row, num_microbatches=4) for name, row in rows.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_algorithm_has_the_numbers_of_one_process_on_ranks_and_in_stages(name: str, tmp_path: Path):
    objective = OBJECTIVES[name]
    model = tiny.build_hf("llama", num_hidden_layers=2)
    original = Original.write(tmp_path, model, objective, kinds=(True,), counts=(4,))
    rows = layouts(objective)
    for layout, errors in zip(rows, launch(run_rows, 2, original, list(rows.values())), strict=True):
        assert isinstance(errors, Errors) and errors.within_rounding(), (layout, errors)


TRL = json.loads((Path(__file__).parents[1] / "vectors" / "trl.json").read_text())["high_entropy"]


def least_certain_on_ranks(rank: int, world: int) -> list[dict[int, list[float]]]:
    """By case: which tokens of this rank's samples are trained on."""
    mesh, samples, found = build_mesh(MeshConfig(dp_size=world).resolve(world), "cpu"), given_samples(), []
    for case in TRL:
        entropies_of = dict(zip((n for n in range(10) if n != 3), case["entropies"], strict=True))
        (update,) = updates_of(samples, True, mesh.dp_rank, mesh.dp_size)
        entropies = [torch.full(batch.shape, 9.0) for batch in update.batches]  # of tokens that nobody drew
        places = [(b, *at) for b, spread in enumerate(update.spread) for at in spread]
        for b, row, first, number in places:
            entropies[b][row, first : first + len(entropies_of[number])] = torch.tensor(entropies_of[number])
        columns = [
            b.extra["uncertain_BT"] for b in add_entropy_mask(update, entropies, samples, case["share"], mesh).batches
        ]
        found.append(
            {n: columns[b][row, first : first + len(samples[n].tokens)].tolist() for b, row, first, n in places}
        )
        assert sum(column.sum().item() for column in columns) == sum(map(sum, found[-1].values()))
    return found


def test_the_least_certain_tokens_of_all_ranks_are_those_that_trl_trains_on():
    on_ranks = launch_all(least_certain_on_ranks, 2)
    for case, *parts in zip(TRL, *on_ranks, strict=True):
        assert all(parts), "a rank without samples shows nothing"
        found = {number: chosen for part in parts for number, chosen in part.items()}
        assert [found[number] for number in sorted(found)] == case["chosen"]


REWARDS = torch.linspace(-1, 2, 10, dtype=torch.float64)
GAMMA, LAM, KL = 0.9, 0.8, RewardKL(0.1, "k1")


def value_of(token: int) -> float:
    return (token % 13) / 10


def judged(update: Minibatch) -> Minibatch:
    """Values that a token's successor decides, and a KL of a hundredth of it."""
    values = [(b.labels_BT % 13) / 10 for b in update.batches]
    old = [b.extra["sampler_logprobs_BT"] for b in update.batches]
    ref = [o_BT - b.labels_BT / 100 for o_BT, b in zip(old, update.batches, strict=True)]
    update = update.with_column("old_values_BT", values).with_column("old_logprobs_BT", old)
    return update.with_column("ref_logprobs_BT", ref)


def by_definition(sample: Sample, reward: float) -> list[float]:
    """A_t as a double sum (arXiv:1506.02438, eq. 16)."""
    values = [*map(value_of, sample.tokens), 0.0]
    rewards = [-0.1 * token / 100 for token in sample.tokens]
    rewards[-1] += reward
    deltas = [r + GAMMA * after - v for r, v, after in zip(rewards, values, values[1:], strict=False)]
    return [sum((GAMMA * LAM) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def advantages_on_ranks(rank: int, world: int, whiten: bool) -> dict[int, tuple[list[float], list[float], float]]:
    """Of the samples of this rank: advantages, returns, and the mean advantage that every rank knows."""
    mesh = build_mesh(MeshConfig(dp_size=world).resolve(world), "cpu")
    samples = given_samples()
    (update,) = updates_of(samples, True, mesh.dp_rank, mesh.dp_size)
    made, means_N = TokenAdvantages(GAMMA, LAM, True, whiten, KL).into([judged(update)], samples, REWARDS, mesh)
    found = {}
    for batch, spread in zip(made[0].batches, made[0].spread, strict=True):
        for row, first, number in spread:
            at = slice(first, first + len(samples[number].tokens))
            columns = (batch.extra[name][row, at].tolist() for name in ("advantages_BT", "returns_BT"))
            found[number] = (*columns, means_N[number].item())
        outside_BT = batch.labels_BT < 0
        assert batch.extra["advantages_BT"][outside_BT].eq(0).all()
    return found


@pytest.mark.parametrize("whiten", [False, True])
def test_a_critics_advantages_on_ranks_are_those_of_the_definition(whiten: bool):
    found = {number: of for of_rank in launch_all(advantages_on_ranks, 2, whiten) for number, of in of_rank.items()}
    samples = given_samples()
    want = {number: by_definition(samples[number], REWARDS[number].item()) for number in found}
    assert len(found) == 9
    every = torch.tensor([value for values in want.values() for value in values], dtype=torch.float64)
    for number, (advantages, returns, mean) in found.items():
        plain = torch.tensor(want[number], dtype=torch.float64)
        shown = (plain - every.mean()) / (every.var() + 1e-8).sqrt() if whiten else plain
        assert advantages == pytest.approx(shown.tolist(), abs=1e-5)
        assert mean == pytest.approx(shown.mean().item(), abs=1e-5)
        values = [value_of(token) for token in samples[number].tokens]
        assert returns == pytest.approx((plain + torch.tensor(values)).tolist(), abs=1e-5)
