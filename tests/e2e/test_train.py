"""What a user does: train, kill, resume, stop, export, under every way of starting ranks."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import (
    automodel,
    cold,
    curve,
    kill_after_step,
    metrics,
    start,
    wait_for_step,
    write_config,
)
from tests.pages import undocumented_metrics


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run in one process, which the others are compared with."""
    folder = tmp_path_factory.mktemp("whole")
    write_config(folder)
    done = cold(folder, "finetune", "llm", "-c", "tiny.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_run_folder_holds_what_is_promised(whole: Path) -> None:
    run = whole / "runs" / "tiny"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "export", "report.html", "loss.svg"} <= names
    assert (run / "checkpoints" / "step-000020" / "meta.json").exists()
    rows = [row for row in metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 21))
    promised = {"step", "loss", "grad_norm", "lr", "num_label_tokens", "num_tokens"}
    promised |= {"tokens_per_second", "step_seconds", "memory_gib", "mfu"}
    assert all(promised <= set(row) for row in rows)
    assert undocumented_metrics(run) == set()
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert any("val_loss" in row for row in metrics(run))


def test_the_record_counts_the_documents_of_a_step(whole: Path) -> None:
    about = json.loads((whole / "runs" / "tiny" / "run.json").read_text())["about"]
    assert re.search(r"\d rows \((about )?[\d.,]+ documents\) a step", about["steps"])


def test_the_curve_is_the_golden_one(whole: Path) -> None:
    """`tests/golden/tiny_sft.json` pins the numbers; regenerate it only for a change that is meant to change them."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "tiny_sft.json").read_text())
    run = whole / "runs" / "tiny"
    for key in ("loss", "grad_norm"):
        assert curve(run, key) == pytest.approx(golden[key], rel=1e-5)  # other processors round differently


def test_export_is_the_trained_model(whole: Path) -> None:
    """transformers loads it without us, and it has learnt something."""
    folder = whole / "runs" / "tiny" / "export"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    mask = torch.as_tensor(encoded["assistant_masks"])[0].bool()
    assert tokenizer.decode(encoded["input_ids"][0][mask]) == "5<|end|>"
    with torch.no_grad():
        logprobs = model(input_ids=encoded["input_ids"]).logits[0].log_softmax(-1)
    trained = -logprobs[:-1].gather(-1, encoded["input_ids"][0, 1:, None])[mask[1:], 0].mean().item()
    untrained = torch.log(torch.tensor(float(model.config.vocab_size))).item()
    assert trained < untrained - 0.3


LAYOUTS = {"pp2-dp2": ["mesh.pp_size=2", "mesh.dp_size=2", "pipeline=zb_h1"]}
MORE_LAYOUTS = {
    "fsdp2": ["mesh.dp_size=2"],
    "pp2": ["mesh.pp_size=2", "pipeline=1f1b"],
    "hsdp": ["mesh.dp_size=4", "mesh.dp_replicate_size=2"],
    "ddp": ["mesh.dp_size=2", "parallelizer=ddp", "~parallelizer.mp_policy", "train.microbatch_size=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param(overrides, id=name) for name, overrides in LAYOUTS.items()),
        *(pytest.param(overrides, id=name, marks=pytest.mark.slow) for name, overrides in MORE_LAYOUTS.items()),
    ],
)
def test_ranks_do_not_change_the_numbers(whole: Path, tmp_path: Path, overrides: list[str]) -> None:
    write_config(tmp_path)
    command = cold if overrides == MORE_LAYOUTS["fsdp2"] else automodel
    done = command(tmp_path, "finetune", "llm", "-c", "tiny.yaml", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, reference = tmp_path / "runs" / "tiny", whole / "runs" / "tiny"
    assert curve(ours) == pytest.approx(curve(reference), rel=1e-5)
    assert curve(ours, "grad_norm") == pytest.approx(curve(reference, "grad_norm"), rel=1e-4)
    assert curve(ours, "num_label_tokens") == curve(reference, "num_label_tokens")
    assert curve(ours, "val_loss") == pytest.approx(curve(reference, "val_loss"), rel=1e-5)


def test_a_killed_run_goes_on_bitwise(tmp_path: Path) -> None:
    """28 steps == some + kill -9 + the rest: every recorded loss and norm, to the last bit."""
    write_config(tmp_path)
    more = ["train.max_steps=28", "checkpoint.every=4", "logging.report=false"]
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "run_name=whole", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = start(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "run_name=killed", *more)
    run = tmp_path / "runs" / "killed"
    kill_after_step(killed, run, 10)
    resumed = automodel(tmp_path, "resume", "runs/killed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for key in ("loss", "grad_norm", "lr", "val_loss"):
        assert curve(run, key) == curve(tmp_path / "runs" / "whole", key)
    weights = [(tmp_path / "runs" / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    write_config(tmp_path)
    killed = start(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "train.max_steps=28", "checkpoint.every=1000")
    kill_after_step(killed, tmp_path / "runs/tiny", 2)
    resumed = automodel(tmp_path, "resume", "runs/tiny", "train.max_steps=4")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "from the start, because the run has no checkpoint" in resumed.stdout
    assert len(curve(tmp_path / "runs/tiny")) == 4


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(whole: Path, tmp_path: Path) -> None:
    """Ten steps on one rank and ten over two pipeline stages, and the other way round: the curve of one process."""
    layouts = [[], ["mesh.pp_size=2", "pipeline=1f1b"]]
    for first, second in (layouts, layouts[::-1]):
        folder = tmp_path / str(len(first))
        folder.mkdir()
        write_config(folder)
        begun = automodel(folder, "finetune", "llm", "-c", "tiny.yaml", "train.max_steps=10", *first, *_SAME_LR)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        back = [] if second else ["mesh.pp_size=1", "~pipeline"]
        resumed = automodel(folder, "resume", "runs/tiny", "train.max_steps=20", *second, *back)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        run = folder / "runs" / "tiny"
        straight = automodel(folder, "finetune", "llm", "-c", "tiny.yaml", "run_name=straight", *_SAME_LR)
        assert straight.returncode == 0, straight.stdout + straight.stderr
        assert curve(run) == pytest.approx(curve(folder / "runs" / "straight"), rel=1e-5)


_SAME_LR = ["lr_scheduler=constant"]  # a schedule over 20 steps is another one than over 10


@pytest.mark.smoke
def test_adapters_train_alone_and_are_merged_into_the_export(tmp_path: Path) -> None:
    write_config(tmp_path)
    arguments = ["model.lora={rank: 4}", "train.max_steps=4"]
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained" in done.stdout and "max |log-prob difference|" in done.stdout
    names = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "tiny" / "export").state_dict()
    assert not any("lora" in name for name in names)
    adapter = tmp_path / "runs" / "tiny" / "export" / "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}


@pytest.mark.slow
def test_a_stopped_run_saves_and_goes_on_with_other_ranks(whole: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    stopped = start(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "train.max_steps=200", "checkpoint.every=null")
    run = tmp_path / "runs" / "tiny"
    wait_for_step(stopped, run, 3)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 75, output
    step = max(row["step"] for row in metrics(run))
    assert step < 200 and (run / "checkpoints" / f"step-{step:06d}").is_dir()
    assert "automodel resume" in output
    resumed = automodel(tmp_path, "resume", "runs/tiny", "mesh.dp_size=2", f"train.max_steps={step + 4}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, step + 5))


def test_the_export_command_writes_the_same_weights(whole: Path) -> None:
    done = automodel(whole, "export", "runs/tiny", "--out", "again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "max |log-prob difference|" in done.stdout
    first, again = (folder / "model.safetensors" for folder in (whole / "runs" / "tiny" / "export", whole / "again"))
    assert first.read_bytes() == again.read_bytes()


def test_a_second_run_gets_a_folder_of_its_own(whole: Path) -> None:
    before = (whole / "runs" / "tiny" / "metrics.jsonl").read_bytes()
    done = automodel(whole, "finetune", "llm", "-c", "tiny.yaml", "train.max_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (whole / "runs" / "tiny-2" / "metrics.jsonl").exists()
    assert (whole / "runs" / "tiny" / "metrics.jsonl").read_bytes() == before


def test_a_bad_row_is_named_with_exit_code_3(tmp_path: Path) -> None:
    write_config(tmp_path)
    good = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'
    (tmp_path / "rows.jsonl").write_text(good * 3 + '{"messages": "oops"}\n' + good)
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "data.path=rows.jsonl", "data.generator=null")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "rows.jsonl:4" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_step_that_is_not_finite_ends_the_run_with_its_rows(tmp_path: Path) -> None:
    write_config(tmp_path)
    done = automodel(
        tmp_path,
        "finetune",
        "llm",
        "-c",
        "tiny.yaml",
        "optimizer.lr=1e30",
        "lr_scheduler=constant",
        "train.max_grad_norm=null",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not finite" in done.stderr or "gradient norm is" in done.stderr
    assert "ChatTasks/train" in done.stderr and "Traceback" not in done.stderr
    saved = sorted(path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))
    last = max((row["step"] for row in metrics(tmp_path / "runs" / "tiny")), default=0)
    assert all(int(name.removeprefix("step-")) <= last for name in saved)
