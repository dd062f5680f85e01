"""What a run keeps between its starts: the reference's log-probs, and the validation that a notice to stop put off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.float8.grouped_gemm import arithmetic_of
from automodel_cli.models.tokenizer import ByteTokenizer
from tests import tiny
from tests.dist.harness import launch
from tests.dist.sessions import session, train
from tests.e2e.command import TINY, metrics
from tests.e2e.test_dpo import PAIRS

pytestmark = pytest.mark.slow

SFT = TINY.format(family="llama").replace("num_train: 400", "num_train: 40")
DPO = PAIRS.format(family="llama").replace("num_train: 200, num_validation: 16", "num_train: 24, num_validation: 4")
FEW = ("train.max_steps=4", "logging.report=false", "logging.console=plain", "checkpoint.every=null")


def _train(rank, world, folder, *overrides, stop_at=0, run=None):
    """Train; at step `stop_at` a notice comes. Returns nothing: the run folder holds what is asked."""
    with session(folder, SFT, *FEW, *overrides, run=run) as opened:
        train(opened, stop_at)


def _stopped_at(rank, world, folder, step, *overrides):
    _train(rank, world, folder, *overrides, stop_at=step)


def _resumed(rank, world, folder, run, *overrides):
    _train(rank, world, folder, *overrides, run=run)


@pytest.mark.parametrize("step", [2, 4], ids=["in the middle", "at the end"])
def test_a_validation_that_a_notice_put_off_comes_first_in_the_continued_run(tmp_path: Path, step: int) -> None:
    launch(_train, 1, tmp_path, "run_name=whole", "validation.every=2", process_group=False)
    launch(_stopped_at, 1, tmp_path, step, "run_name=halves", "validation.every=2", process_group=False)
    stopped = metrics(tmp_path / "runs/halves")
    assert "val_loss" not in stopped[-1] and stopped[-1]["step"] == step
    for _ in range(2):  # the second one finds it measured
        launch(_resumed, 1, tmp_path, "halves", "validation.every=2", process_group=False)
    whole, halves = ([_timeless(row) for row in metrics(tmp_path / "runs" / run)] for run in ("whole", "halves"))
    assert halves == whole and sum("val_loss" in row for row in halves) == 2
    best = [os.readlink(tmp_path / "runs" / run / "checkpoints" / "best") for run in ("whole", "halves")]
    assert best[0] == best[1] == "step-000004"
    meta = json.loads((tmp_path / f"runs/halves/checkpoints/step-{step:06d}/meta.json").read_text())
    assert meta["metrics"]["val_loss"] == next(r for r in whole if r["step"] == step and "val_loss" in r)["val_loss"]


MIXTURE = "model_type: qwen3_moe\n    num_experts: 4\n    num_experts_per_tok: 2\n    moe_intermediate_size: 32"
TO_THE_LAST_BIT = {
    "8-bit products": (MIXTURE, "model.fp8={emulate: true, experts: true}"),
    "heads of later tokens": ("model_type: qwen3", "model.mtp={depths: 2, loss_weight: 0.3}"),
}


@pytest.mark.parametrize("what", TO_THE_LAST_BIT)
def test_a_run_goes_on_to_the_last_bit(tmp_path: Path, what: str) -> None:
    """Nothing is remembered of casts: not of linear layers', nor of experts'. Layers for multi-token prediction, which
    are not among the model's own, are kept with their state of the optimizer."""
    of = TO_THE_LAST_BIT[what]
    want = launch(_all_steps, 1, tmp_path, of, 0, None, "run_name=whole", process_group=False)
    launch(_all_steps, 1, tmp_path, of, 2, None, "run_name=halves", process_group=False)
    got = launch(_all_steps, 1, tmp_path, of, 0, "halves", process_group=False)
    whole, halves = ([_timeless(row) for row in metrics(tmp_path / "runs" / run)] for run in ("whole", "halves"))
    assert halves == whole and [row["step"] for row in halves if "loss" in row] == [1, 2, 3, 4]
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert all("mtp_loss" in row for row in whole if "loss" in row) == ("mtp" in of[1])


def _all_steps(rank, world, folder, of, stop_at, run, *overrides):
    """What a model has in the end, by name."""
    sizes, setting = of
    words = (setting, "validation.every=null", *overrides)
    with session(folder, SFT.replace("model_type: llama", sizes), *FEW, *words, run=run) as opened:
        train(opened, stop_at)
        (part,) = opened.model.parts
        if "fp8" in setting:
            assert all(arithmetic_of(experts) is not None for experts in experts_modules(part))
        return {name: tiny.full(param.detach()).clone() for name, param in part.named_parameters()}


def _timeless(row: dict) -> dict:
    times = "tokens_per_second", "step_seconds", "data_wait_share", "memory_gib"
    return {key: value for key, value in row.items() if key not in times}


def _pairs(rank, world, folder, *overrides):
    with session(folder, DPO, *FEW, "data.seq_len=96", *overrides) as opened:
        for step, batches in opened.steps():
            opened.train(step, batches)


@pytest.mark.parametrize(
    "objective",
    ["objective.loss=aot_unpaired", "objective.use_wpo_weighting=true"],
)
def test_what_a_loss_reads_of_the_policy_before_an_update_is_that_of_all_ranks(tmp_path: Path, objective: str) -> None:
    """Whole numbers, not their parts: one rank sorts the pairs that two ranks share."""
    for world in (1, 2):
        name = f"run_name=ranks{world}"
        launch(_pairs, world, tmp_path, name, objective, "objective.beta=1.0", "train.max_steps=3", process_group=False)
    one, two = ([r for r in metrics(tmp_path / "runs" / f"ranks{n}") if "loss" in r] for n in (1, 2))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-4)
    assert abs(one[-1]["loss"] - one[0]["loss"]) > 1e-3, "the test shows nothing"
    assert "wpo" not in objective or all(row["wpo_weight"] > 0 for row in one)


def _reference(rank, world, folder, *overrides):
    """Every token's cached value."""
    with session(folder, DPO, *FEW, "data.seq_len=96", *overrides) as opened:
        return np.array(opened.data.train._columns["ref_logprobs_BT"])


def test_other_weights_at_the_same_path_get_another_reference(tmp_path: Path) -> None:
    """Close ones too: comparing a few log-probs with a tolerance for rounding would take them for the same."""
    folder = tmp_path / "model"
    tiny.build_hf("llama", vocab_size=len(ByteTokenizer().build())).save_pretrained(folder)
    model = ("model.config=null", f"model.pretrained={folder}")
    first = launch(_reference, 1, tmp_path, *model, process_group=False)
    notes = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "reference").iterdir()}
    again = launch(_reference, 1, tmp_path, *model, process_group=False)
    found = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "reference").iterdir()}
    assert found == notes, "nothing was measured again"
    np.testing.assert_array_equal(again, first)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * (1 + 1e-4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changed = launch(_reference, 1, tmp_path, *model, process_group=False)
    fresh = launch(_reference, 1, tmp_path, *model, f"data.cache_dir={tmp_path / 'other'}", process_group=False)
    assert 0 < np.abs(changed - first).max() < 1e-3
    np.testing.assert_array_equal(changed, fresh)
    for path in (tmp_path / "cache" / "reference").glob("*.npy"):  # a damaged file is measured again
        values = bytearray(path.read_bytes())
        values[-3] ^= 64
        path.write_bytes(values)
    np.testing.assert_array_equal(launch(_reference, 1, tmp_path, *model, process_group=False), fresh)
