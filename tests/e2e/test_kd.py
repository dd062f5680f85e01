"""Distillation on rows (`automodel kd llm`) and on the student's own samples (`automodel grpo llm objective=gkd`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e import test_grpo
from tests.e2e.command import TINY, automodel, curve, metrics
from tests.errors import assert_error

pytestmark = pytest.mark.slow

STEPS = ("train.max_steps=3", "logging.report=false", "optimizer.eps=1e-5")
TEACHER = "teacher={_target_: automodel_cli.models.teacher_config.TeacherConfig, pretrained: runs/teacher/export}"
ANSWERS = "{answers: {_target_: automodel_cli.evaluation.config.Generation, max_new_tokens: 4, num_samples: 1}}"
SMALLER = ("model.config.hidden_size=32", "model.config.head_dim=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kd")
    (folder / "rows.yaml").write_text(TINY.format(family="llama"))
    (folder / "distil.yaml").write_text(TINY.replace("[sft, _self_]", "[kd, _self_]").format(family="llama"))
    (folder / "samples.yaml").write_text(test_grpo.TINY.format(family="llama").replace(", top_p: 0.95", ""))
    done = automodel(folder, "finetune", "llm", "-c", "rows.yaml", "run_name=teacher", *STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def distil(folder: Path, name: str, *overrides: str) -> list[float]:
    done = automodel(folder, "kd", "llm", "-c", "distil.yaml", f"run_name={name}", TEACHER, *STEPS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return curve(folder / "runs" / name)


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    """Of a run whose student answers questions, too, which the other runs show to change nothing."""
    return distil(folder, "alone", *SMALLER, f"validation.tasks={ANSWERS}")


def test_a_smaller_student_comes_nearer_to_its_teacher(folder, losses):
    first, *_, last = [row["kd_loss"] for row in metrics(folder / "runs" / "alone") if "kd_loss" in row]
    assert first == pytest.approx(losses[0], rel=1e-6) and 0 < last < first
    asked = [row for row in metrics(folder / "runs" / "alone") if "val_loss" in row]
    assert asked and all("val_answers_accuracy" in row for row in asked)


@pytest.mark.parametrize("layout", [("mesh.dp_size=2",), ("mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b")])
def test_ranks_and_stages_ask_the_teacher_the_same(folder, losses, layout):
    assert distil(folder, layout[0].replace(".", "-").replace("=", "-"), *SMALLER, *layout) == pytest.approx(
        losses, rel=5e-6
    )


def files(folder: Path) -> dict[Path, int]:
    """What is kept of teachers, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "cache" / "teacher").glob("*.npy")}


def test_what_is_kept_of_a_teacher_teaches_the_very_same(folder, losses):
    """Of few rows at first, then of all, on two ranks, which measure what is missing; then nothing is."""
    kept = ("cache_teacher_logprobs=true", *SMALLER)
    assert distil(folder, "kept_few", *kept, "train.max_steps=1") == losses[:1]
    before = files(folder)
    assert distil(folder, "kept", *kept, "mesh.dp_size=2") == pytest.approx(losses, rel=5e-6)
    measured = files(folder)
    assert set(before) == set(measured) and measured != before
    assert distil(folder, "again", *kept) == losses
    assert files(folder) == measured


def test_another_teacher_is_asked_anew_and_the_same_one_elsewhere_is_not(folder, losses):
    kept = ("cache_teacher_logprobs=true", *SMALLER, "teacher.pretrained=elsewhere")
    distil(folder, "kept_first", "cache_teacher_logprobs=true", *SMALLER)
    before = files(folder)
    shutil.copytree(folder / "runs/teacher/export", folder / "elsewhere")
    assert distil(folder, "moved", *kept) == losses and files(folder) == before
    path = folder / "elsewhere/model.safetensors"
    weights = load_file(path)
    save_file({name: 1.01 * tensor for name, tensor in weights.items()}, path, metadata={"format": "pt"})
    assert distil(folder, "other", *kept) != losses
    assert len(files(folder)) == len(before) + 2 and before.items() <= files(folder).items()


def test_the_whole_vocabulary_is_kept_exactly_too(folder):
    live = distil(folder, "live_all", *SMALLER, "objective.top_k=null", "objective.beta=0.5")
    kept = distil(
        folder, "kept_all", *SMALLER, "objective.top_k=null", "objective.beta=0.5", "cache_teacher_logprobs=true"
    )
    assert kept == live


def test_a_student_that_is_its_teacher_has_nothing_to_learn(folder):
    own = ("model.config=null", "model.pretrained=runs/teacher/export", "model.tokenizer=null", "objective.top_k=null")
    losses = distil(folder, "itself", *own, "train.max_steps=1")
    assert losses == pytest.approx([0.0], abs=1e-6)


def test_a_teacher_with_other_tokens_is_refused(folder):
    done = automodel(folder, "kd", "llm", "-c", "distil.yaml", TEACHER, *STEPS, "model.config.vocab_size=360")
    assert done.returncode == 2
    assert_error(done.stderr, "vocabulary_mismatch", "teacher.pretrained", values=(360,))


def test_on_its_own_samples_a_student_needs_a_teacher_and_no_reward(folder):
    arguments = (
        "-c",
        "samples.yaml",
        "objective={_target_: automodel_cli.objectives.distillation.Distillation, beta: 0.5}",
    )
    objective = ("~objective.kl_coef",)
    done = automodel(folder, "check", *arguments, *objective)
    assert done.returncode == 2
    assert_error(done.stderr, "requires_setting", "teacher")
    done = automodel(
        folder, "grpo", "llm", *arguments, *objective, TEACHER, *SMALLER, *STEPS, "~rewards", "run_name=on_policy"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in metrics(folder / "runs" / "on_policy") if "kd_loss" in row]
    assert rows[-1]["kd_loss"] < rows[0]["kd_loss"] and rows[0]["num_trained_samples"] == 16
    assert "reward" not in rows[0] and "reward before" not in done.stdout  # there is none that could be 0


def test_reverse_kl_of_each_drawn_token_is_its_advantage(folder):
    """On-policy distillation by policy gradients: the advantage of a token is log teacher - log student, no more."""
    done = automodel(
        folder, "grpo", "llm", "-c", "samples.yaml", TEACHER, *SMALLER, *STEPS, "~rewards", "run_name=reverse",
        "objective.kl_placement=reward", "objective.kl_type=k1", "objective.kl_coef=1.0",
        "rollout.advantage_estimator=batch", "rollout.gamma=0.0", "rollout.normalize_advantages=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first = next(row for row in metrics(folder / "runs" / "reverse") if "advantage_mean" in row)
    assert first["advantage_mean"] < 0 and abs(first["advantage_mean"]) < 5  # minus a KL
