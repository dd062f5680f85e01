"""Updates on chosen samples: every layout and packing against the library's model in one process and float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.objectives.best_of_n import BestOfN
from automodel_cli.objectives.online_dpo import OnlineDPO
from automodel_cli.parity.compare import Errors, GradientRecorder, build_parity_stages, step_errors
from automodel_cli.parity.gradient_errors import full_gradients
from automodel_cli.parity.reference import Original, Reference
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Sample
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch
from tests.dist.test_grpo import given_samples, row

pytestmark = pytest.mark.slow

OBJECTIVES = {"best of n": BestOfN(threshold=1.0), "online dpo": OnlineDPO(beta=0.3)}
ROWS = [row(dp=2), row(dp=2, packed=False), row(pp=2)]


def update_of(objective: Any, samples: Sequence[Sample], packed: bool, dp_rank: int, dp_size: int) -> Minibatch:
    rewards_N = torch.tensor([sample.score.total for sample in samples], dtype=torch.float64)
    places_N = torch.tensor([sample.place for sample in samples])
    chosen = objective.select(rewards_N, places_N, torch.ones(len(samples), dtype=torch.bool))
    plan = PackingConfig(
        52, packed, pad_to_multiple_of=1, microbatch_size=1, pad_id=0, fits=lambda count: count % 2 == 0
    )
    (update,) = pack_minibatches(samples, chosen, 1, plan, dp_rank=dp_rank, dp_size=dp_size)
    if "pairs_P2" not in objective.columns:
        return update
    ref = [0.9 * batch.extra["sampler_logprobs_BT"] for batch in update.batches]
    return update.with_pairs(chosen).with_column("ref_logprobs_BT", ref)


def loss_by_hand(name: str, model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Of the model in float64, one sample at a time; the rewards of place p are p and p + 1."""

    def nlls(sample: Sample) -> torch.Tensor:
        ids = torch.tensor([[*sample.prompt.tokens, *sample.tokens]])
        logits_TV = model(input_ids=ids).logits[0, len(sample.prompt.tokens) - 1 : -1]
        return cross_entropy(logits_TV, torch.tensor(sample.tokens), reduction="none")

    if name == "online dpo":

        def above_reference(sample: Sample) -> torch.Tensor:
            return -nlls(sample).sum() - 0.9 * sum(sample.logprobs)

        pairs = [(samples[n + 1], samples[n]) for n in range(0, len(samples), 2)]
        margins = torch.stack([above_reference(good) - above_reference(bad) for good, bad in pairs])
        return -logsigmoid(0.3 * margins).mean()
    best = [sample for sample in samples if sample.index == 1 and sample.place > 0]
    return torch.cat([nlls(sample) for sample in best]).mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selection")
    model = tiny.build_hf("llama")
    model.save_pretrained(folder / "llama")
    own = {name: by_hand(name, model) for name in OBJECTIVES}
    model.double()
    for name in OBJECTIVES:
        exact = by_hand(name, model)
        torch.save(vars(replace(exact, rounding=exact.error_of(own[name]))), folder / f"{name}.pt")
    return folder


def by_hand(name: str, model: torch.nn.Module) -> Reference:
    model.zero_grad()
    loss = loss_by_hand(name, model, given_samples())
    loss.backward()
    gradients = {name: grad.clone() for name, grad in full_gradients([model]).items()}
    norm = torch.stack([grad.double().square().sum() for grad in gradients.values()]).sum().sqrt()
    return Reference(loss.item(), norm.item(), gradients)


def steps(rank: int, world: int, folder: Path, rows: Sequence[Any]) -> list[tuple[str, Errors]]:
    found = []
    for which in rows:
        for name, objective in OBJECTIVES.items():
            mesh = build_mesh(which.mesh.resolve(world), "cpu")
            stages = build_parity_stages(Original(folder / "llama"), which, mesh)
            update = update_of(objective, given_samples(), which.packed, mesh.dp_rank, mesh.dp_size)
            recorder = GradientRecorder(*stages.parts)
            result = train_step(stages, update.batches, objective, recorder, mesh, max_grad_norm=None)
            found.append(
                (name, step_errors(Reference(**torch.load(folder / f"{name}.pt")), result, recorder.gradients))
            )
    return found


def test_layouts_and_packing_give_the_loss_of_the_chosen_samples_by_hand(folder):
    found = launch(steps, 2, folder, ROWS)
    assert len(found) == len(ROWS) * len(OBJECTIVES)
    for name, errors in found:
        assert errors.within_rounding(), f"{name}: {errors}"
