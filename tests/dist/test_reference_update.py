"""A reference that follows the policy: its weights by the formula, read from checkpoints; what a resumed run has of
it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import FSDP2Config, MegatronFSDPConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.run.frozen_models.reference_sync import ReferenceSync, check_reference_update
from tests.dist.harness import launch
from tests.dist.sessions import session, train
from tests.dist.test_sessions import DPO
from tests.e2e.command import metrics
from tests.e2e.test_grpo import TINY

pytestmark = pytest.mark.slow

QUIET = ("logging.report=false", "logging.console=plain")
EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep_latest_k=10", "data.seq_len=96", "train.max_steps=5", *QUIET)
SOFT = "reference_sync={every_steps: 2, mixup_alpha: 0.6}"


def _dpo(rank, world, folder, *overrides, stop_at=0, run=None):
    with session(folder, DPO, *EVERY_STEP, *overrides, run=run) as opened:
        train(opened, stop_at)


def _stopped(rank, world, folder, *overrides):
    _dpo(rank, world, folder, *overrides, stop_at=3)


def _resumed(rank, world, folder, run):
    _dpo(rank, world, folder, SOFT, run=run)


def _grpo(rank, world, folder, *overrides):
    from automodel_cli.rollout.rollout_manager import Rollouts

    with session(folder, TINY.format(family="llama"), *QUIET, *overrides) as opened:
        recipe = opened.recipe
        rollouts = Rollouts(opened, recipe.rollout, recipe.rewards, recipe.objective, None, recipe.reference_sync)
        opened.callbacks.add(rollouts)
        for step, prompts in opened.steps():
            rollout = rollouts.collect(step, prompts)
            with rollouts.scoring():
                opened.train(step, *rollout.passes())
            rollouts.sync(step)


def weights(run: Path, step: int, prefix: str) -> dict[str, torch.Tensor]:
    """Everything below `prefix` in a checkpoint, whole."""
    reader = FileSystemReader(run / "checkpoints" / f"step-{step:06d}")
    entries = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in entries.items() if key.startswith(prefix)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in state.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    launch(_dpo, 2, folder, "run_name=soft", SOFT, process_group=False)
    return folder


def test_a_soft_update_mixes_the_weights_of_the_checkpoints_by_the_formula(folder):
    run = folder / "runs" / "soft"
    want = weights(run, 1, "reference.model.")
    assert len(want) > 10 and set(want) == set(weights(run, 1, "model."))
    for step in range(2, 6):
        found, policy = weights(run, step, "reference.model."), weights(run, step, "model.")
        if step % 2 == 0:
            want = {name: 0.4 * old + 0.6 * policy[name] for name, old in want.items()}
        for name, tensor in found.items():
            assert (tensor - want[name]).abs().max() <= 1e-6, (step, name)
    moved = max((found[name] - policy[name]).abs().max().item() for name in found)
    assert moved > 1e-4, "the test shows nothing"


def test_a_stopped_run_goes_on_with_the_reference_of_its_checkpoint(folder):
    launch(_stopped, 2, folder, "run_name=halves", SOFT, process_group=False)
    launch(_resumed, 2, folder, "halves", process_group=False)
    whole, halves = (folder / "runs" / name for name in ("soft", "halves"))
    for prefix in ("model.", "reference.model."):
        ours, theirs = weights(halves, 5, prefix), weights(whole, 5, prefix)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [[row["loss"] for row in metrics(run) if "loss" in row] for run in (whole, halves)]
    assert losses[0] == losses[1]


def test_after_a_hard_update_at_each_step_no_pair_is_preferred_to_the_reference(folder):
    launch(_dpo, 1, folder, "run_name=hard", "reference_sync.every_steps=1", process_group=False)
    rows = [row for row in metrics(folder / "runs" / "hard") if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx([0.6931472] * 5, abs=1e-6)
    assert all(row["rewards_chosen"] == 0 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("model", ["model.lora=null", "model.lora={rank: 4}"])
def test_the_reference_of_samples_follows_too_also_with_adapters(tmp_path, model):
    # without filters, which the reference does not have: then it is the policy itself after a hard update
    one = (
        "train.global_batch_size=16",
        "objective.kl_coef=0.1",
        "objective.top_entropy_fraction=null",
        "train.max_steps=3",
        model,
        "rollout.top_p=1.0",
    )
    launch(_grpo, 1, tmp_path, *one, "run_name=still", process_group=False)
    launch(_grpo, 1, tmp_path, *one, "run_name=follows", "reference_sync.every_steps=2", process_group=False)
    runs = (metrics(tmp_path / "runs" / name) for name in ("still", "follows"))
    still, follows = ([row["kl_penalty"] for row in run if "loss" in row] for run in runs)
    assert follows[:2] == still[:2] and still[1] > 0
    assert still[2] > 0 and follows[2] == pytest.approx(0, abs=1e-9)


def _dropped(rank, world, folder, checkpoint):
    with session(folder, DPO, *EVERY_STEP, f"checkpoint.resume={checkpoint}", "reference_mode=frozen_copy") as opened:
        return opened.checkpointer.dropped()


def test_a_checkpoint_without_the_reference_is_refused_and_one_that_nobody_wants_is_told(folder):
    assert launch(_dropped, 1, folder, folder / "runs/soft/checkpoints/step-000005", process_group=False) == [
        "reference"
    ]
    launch(_dpo, 1, folder, "run_name=plain", "reference_mode=frozen_copy", "train.max_steps=1", process_group=False)
    with pytest.raises(Exception, match=re.escape("contains no reference")):
        launch(_resumed, 1, folder, "plain", process_group=False)


class _Recipe:
    model, parallelizer = ModelConfig(pretrained="x"), FSDP2Config()


@pytest.mark.parametrize(
    ("change", "has_reference", "update", "key"),
    [
        ({}, False, ReferenceSync(1), "objective"),
        ({"model": ModelConfig(pretrained="x", lora=LoRAConfig(rank=4))}, True, ReferenceSync(1, 0.5), "model.lora"),
        ({"parallelizer": MegatronFSDPConfig()}, True, ReferenceSync(1), "parallelizer"),
    ],
)
def test_what_a_reference_cannot_follow_is_refused(change, has_reference, update, key):
    recipe = _Recipe()
    vars(recipe).update(change)
    with pytest.raises(ConfigError) as caught:
        check_reference_update(recipe.model, recipe.parallelizer, update, has_reference=has_reference)
    assert key in caught.value.keys
