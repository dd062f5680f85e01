"""`automodel dpo llm`: where the reference comes from changes no number, nor do ranks, stages and a restart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.command import TINY, automodel, curve, metrics
from tests.errors import assert_error
from tests.pages import undocumented_metrics

pytestmark = pytest.mark.slow

TASK = "_target_: automodel_cli.data.synthetic.preference_tasks.PreferenceTasks, tasks: "
PAIRS = TINY.replace("[sft, _self_]", "[dpo, override lr_scheduler: constant, _self_]").replace(
    "generator: {{_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 400, num_validation: 16}}",
    f"generator: {{{{{TASK}{{{{_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, "
    "num_train: 200, num_validation: 16}}}}",
)
STEPS = ("train.max_steps=4", "checkpoint.every=2", "logging.report=false", "data.seq_len=96")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    (folder / "pairs.yaml").write_text(PAIRS.format(family="llama"))
    rows = [
        {"prompt": f"What is {i} + 1?", "completion": str(i + (1 if i % 2 else 3)), "label": bool(i % 2)}
        for i in range(60)
    ]
    (folder / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(folder: Path, name: str, *overrides: str, command: str = "dpo") -> list[float]:
    done = automodel(folder, command, "llm", "-c", "pairs.yaml", f"run_name={name}", *STEPS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return curve(folder / "runs" / name)


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    """Of a run that answers questions at its validations, too, which the runs that are compared with it do not."""
    questions = (
        "{generator: {_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_validation: 4}, seq_len: 64}"
    )
    answers = f"{{_target_: automodel_cli.evaluation.config.Generation, data: {questions}, max_new_tokens: 4}}"
    return train(folder, "precomputed", "reference_mode=precomputed", f"validation.tasks={{answers: {answers}}}")


def test_every_metric_is_documented(folder, losses):
    undocumented = {name for run in (folder / "runs").iterdir() for name in undocumented_metrics(run)}
    assert all(name.startswith("val_answers_") for name in undocumented)


def test_starts_at_ln_2_and_exports(folder, losses):
    about = json.loads((folder / "runs" / "precomputed" / "run.json").read_text())["about"]
    assert re.search(r"\d rows \((about )?[\d.,]+ pairs\) a step", about["steps"])
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    first, *_, last = metrics(folder / "runs" / "precomputed")
    assert first["step"] == 0 and first["val_accuracy"] == 0 and last["val_num_pairs"] == 16
    assert "val_answers_accuracy" in first and "val_answers_accuracy" in last
    AutoModelForCausalLM.from_pretrained(folder / "runs" / "precomputed" / "export")


@pytest.mark.parametrize(
    "overrides",
    [
        ("reference_mode=frozen_copy",),
        ("mesh.dp_size=2",),
        ("mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b"),
    ],
    ids=["frozen copy", "fsdp2 x2", "pp2"],
)
def test_same_losses(folder, losses, overrides):
    name = overrides[0].partition("=")[2] + overrides[0].partition(".")[2][:2]
    assert train(folder, name, *overrides, command="finetune") == pytest.approx(losses, rel=2e-6)


def test_adapters_off_are_the_loaded_model(folder):
    lora = "model.lora={_target_: automodel_cli.models.lora_config.LoRAConfig, rank: 4}"
    off = train(folder, "off", lora, "optimizer.lr=1e-2")
    assert off[0] == pytest.approx(0.693147, abs=1e-6) and off[-1] != off[0]
    measured = train(folder, "measured", lora, "optimizer.lr=1e-2", "reference_mode=precomputed")
    assert measured == pytest.approx(off, rel=2e-6)


def test_a_resumed_run_compares_with_the_first_model(folder, losses):
    train(folder, "halves", "reference_mode=frozen_copy", "train.max_steps=2")
    kept = {name: (folder / "runs" / "halves" / name).read_bytes() for name in ("config.yaml", "run.json")}
    assert json.loads(kept["run.json"])["attempts"][-1]["state"] == "finished"
    refused = automodel(folder, "resume", "halves", "seed=3")
    assert refused.returncode == 1 and "the data changed since the checkpoint" in refused.stderr
    # The next start hears nothing of it, and a finished run is still one.
    assert {name: (folder / "runs" / "halves" / name).read_bytes() for name in kept} == kept
    assert not list((folder / "runs" / "halves").glob(".*.*"))
    done = automodel(folder, "resume", "halves", "train.max_steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert curve(folder / "runs" / "halves") == pytest.approx(losses, rel=2e-6)


def test_judged_responses(folder):
    losses = train(
        folder, "kto", "objective=kto", "data.generator=null", "data.path=judged.jsonl", "data.validation_size=8"
    )
    assert losses[0] == pytest.approx(0.5, abs=1e-6)
    assert metrics(folder / "runs" / "kto")[-1]["val_num_desirable"] > 0
    rows = [{"prompt": f"{i} + 1", "completion": str(i + 1), "label": True} for i in range(60)]
    (folder / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alike = ("objective=kto", "data.generator=null", "data.path=good.jsonl", "train.max_steps=1", "run_name=good")
    done = automodel(folder, "dpo", "llm", "-c", "pairs.yaml", *STEPS, *alike)
    assert "warning: all responses are judged good" in done.stdout, done.stdout + done.stderr


def test_pairs_are_refused_for_kto_and_other_kinds_for_the_command(folder):
    done = automodel(folder, "dpo", "llm", "-c", "pairs.yaml", "objective=kto", *STEPS)
    assert done.returncode == 3
    assert_error(done.stderr, "wrong_data_kind", "objective", values=("KTO",))
    done = automodel(folder, "dpo", "llm", "-c", "quickstart")
    assert done.returncode == 2
    assert_error(done.stderr, "wrong_recipe", values=("quickstart", "dpo"))
