"""The shipped recipes for clusters, at toy size on 8 CPU processes by the real command line, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import automodel, curve, metrics
from tests.marks import nightly

pytestmark = pytest.mark.slow

NOTHING_ELSE = [f"mesh.{axis}_size=1" for axis in ("pp", "ep", "tp", "cp")]
ONE_PROCESS = ["mesh.dp_size=1", *NOTHING_ELSE, "pipeline=null"]
WITHOUT = {
    "llama3_8b_tp2cp2_tiny": ["parallelizer.sequence_parallel=false"],
    "qwen3_moe_30b_ep8_tiny": ["parallelizer.defer_fsdp_grad_sync=false"],
}
STEPS = {  # gpt_oss for longer, the others until every parameter has moved
    "gpt_oss_pp2ep4_tiny": 8,
    "gpt_oss_pp2ep4_seqpack_tiny": 2,
    "moonlight_16b_pp2ep4_tiny": 2,
    "qwen3_moe_30b_ep8_tiny": 2,
    "llama3_8b_tp2cp2_tiny": 2,
    "deepseek_v3_pp16_ep64_tiny": 2,
    "qwen3_vl_8b_tiny": 2,
    "qwen3_vl_30b_pp2ep4_tiny": 2,
    "gemma3_12b_vlm_tiny": 2,
}


def _train(folder: Path, recipe: str, run_name: str, *more: str) -> Path:
    kind = "vlm" if "vl" in recipe else "llm"
    done = automodel(folder, "finetune", kind, "-c", recipe, f"run_name={run_name}", *more, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / run_name


@pytest.mark.parametrize("recipe", nightly(*STEPS))
def test_8_ranks_train_as_one_process(recipe: str, tmp_path: Path) -> None:
    same = [f"train.max_steps={STEPS[recipe]}", "lr_scheduler=constant"]
    ranks = _train(tmp_path, recipe, "ranks", *same)
    alone = _train(tmp_path, recipe, "alone", *same, *ONE_PROCESS, *WITHOUT.get(recipe, []))
    assert len(curve(alone)) == STEPS[recipe]
    assert curve(ranks) == pytest.approx(curve(alone), rel=1e-5)
    assert curve(ranks, "grad_norm") == pytest.approx(curve(alone, "grad_norm"), rel=1e-4)
    assert curve(ranks, "num_label_tokens") == curve(alone, "num_label_tokens")
    if recipe not in ("llama3_8b_tp2cp2_tiny", "qwen3_vl_8b_tiny", "gemma3_12b_vlm_tiny"):
        assert curve(ranks, "expert_load_max") == pytest.approx(curve(alone, "expert_load_max"), rel=1e-6)


@pytest.mark.nightly
def test_a_run_goes_on_from_experts_and_stages_to_one_process_and_back(tmp_path: Path) -> None:
    """Pipeline 2 x experts 2 x sharded 2, then one process, then experts over 4 ranks: the curve of one process."""
    recipe, constant = "gpt_oss_pp2ep4_tiny", "lr_scheduler=constant"
    straight = _train(tmp_path, recipe, "straight", *ONE_PROCESS, constant, "train.max_steps=6")
    run = _train(tmp_path, recipe, "moved", "mesh.dp_size=4", "mesh.ep_size=2", constant, "train.max_steps=2")
    for steps, layout in (
        (4, ONE_PROCESS),
        (6, ["mesh.dp_size=4", "mesh.pp_size=1", "mesh.ep_size=4"]),
    ):
        done = automodel(tmp_path, "resume", str(run), f"train.max_steps={steps}", *layout, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, 7))
    assert curve(run) == pytest.approx(curve(straight), rel=1e-5)


def test_a_cluster_recipe_in_the_shipped_precision_exports_what_it_trained(tmp_path: Path) -> None:
    """bfloat16 under FSDP2, experts and stages: the size group alone sets float32."""
    words = ("parallelizer.mp_policy=null", "train.max_steps=2")
    run = _train(tmp_path, "gpt_oss_pp2ep4_tiny", "shipped", *words)
    assert (run / "export/config.json").is_file() and not (run / "export/unverified.json").exists()
    done = automodel(tmp_path, "export", str(run), "--out", "again", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = ((folder / "model.safetensors").read_bytes() for folder in (run / "export", tmp_path / "again"))
    assert first == second
