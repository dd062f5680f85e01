"""`automodel pretrain llm` on text files, against transformers on the exported model, piece by piece."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import TINY, automodel, curve, metrics
from tests.errors import assert_error
from tests.marks import slow

SEQ_LEN = 32
DATA = f"data={{path: corpus, validation_path: held_out.txt, seq_len: {SEQ_LEN}}}"
STEPS = ("train.max_steps=3", "logging.report=false", "objective.z_loss_coef=0.001", DATA)
HELD_OUT = "Größe und Länge: a document of more than one hundred bytes, 東京, which is split into pieces. " * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain")
    text = TINY.replace("[sft, _self_]", "[pretrain, _self_]").format(family="llama")
    kept = [line for line in text.splitlines() if "ChatTasks" not in line]
    (folder / "tiny.yaml").write_text("\n".join(kept))
    (folder / "corpus").mkdir()
    for number in range(6):
        sentence = f"Document {number} repeats what it says. " * (number + 1)
        (folder / "corpus" / f"{number}.txt").write_text(sentence * 3)
    (folder / "held_out.txt").write_text(HELD_OUT)
    return folder


def pretrain(folder: Path, name: str, *overrides: str) -> Path:
    done = automodel(folder, "pretrain", "llm", "-c", "tiny.yaml", f"run_name={name}", *STEPS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bits per byte" in done.stdout
    return folder / "runs" / name


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return pretrain(folder, "one")


def test_bits_per_byte_of_held_out_text_are_those_of_the_exported_model(run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    model = AutoModelForCausalLM.from_pretrained(run / "export").double()
    ids = [*tokenizer(HELD_OUT)["input_ids"], tokenizer.eos_token_id]
    pieces = [torch.tensor(ids[a : a + SEQ_LEN]) for a in range(0, len(ids) - 1, SEQ_LEN - 1)]
    with torch.no_grad():
        logprobs = [model(piece[None]).logits[0, :-1].log_softmax(-1) for piece in pieces]
    picked = [of.gather(1, piece[1:, None]) for of, piece in zip(logprobs, pieces, strict=True)]
    bits = -sum(float(of.sum()) for of in picked) / math.log(2)
    num_bytes = len(HELD_OUT.encode()) - len(tokenizer.decode(ids[:1]).encode())  # the first token is no label
    last = metrics(run)[-1]
    assert last["val_num_bytes"] == num_bytes
    assert last["val_bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-5)
    assert metrics(run)[0]["z_loss"] == pytest.approx(math.log(354) ** 2, rel=0.1)  # random weights: flat logits


@pytest.mark.parametrize(
    "layout",
    slow(
        ("run_name=dp2", "mesh.dp_size=2"),
        ("run_name=pp2", "mesh.pp_size=2", "pipeline=1f1b"),
        ("run_name=tp2", "mesh.tp_size=2"),
        ("run_name=cp2", "mesh.cp_size=2"),
    ),
)
def test_ranks_and_stages_train_as_one_process(folder: Path, run: Path, layout: tuple[str, ...]) -> None:
    other = pretrain(folder, layout[0].split("=")[1], *layout[1:])
    assert curve(other) == pytest.approx(curve(run), rel=1e-5)
    for name in ("bits_per_byte", "num_bytes", "z_loss"):
        assert metrics(other)[0][name] == pytest.approx(metrics(run)[0][name], rel=1e-5)


@pytest.mark.slow
def test_a_ramp_in_stages_and_new_data_after_it(folder: Path) -> None:
    ramp = ("train.batch_size_ramp={start: 2, increment: 1, rows: 5}", "train.max_steps=4")
    one = pretrain(folder, "ramp", *ramp)
    stages = pretrain(folder, "ramp_pp2", *ramp, "mesh.pp_size=2", "pipeline=1f1b")
    assert [row["num_tokens"] // SEQ_LEN for row in metrics(one)[:4]] == [2, 2, 3, 4]
    assert curve(stages) == pytest.approx(curve(one), rel=1e-5)

    other = ("run_name=other", "data.path=held_out.txt", "train.extend_schedule=restart", "train.max_steps=6")
    resume = f"checkpoint.resume={one}/checkpoints/step-000004"
    refused = automodel(folder, "pretrain", "llm", "-c", "tiny.yaml", *STEPS, *ramp, *other, resume)
    assert refused.returncode != 0
    assert_error(refused.stderr, "checkpoint_mismatch", fix="checkpoint.new_data=restart")
    warm = pretrain(folder, "warm", *ramp, *other[1:], resume, "checkpoint.new_data=restart")
    assert [row["step"] for row in metrics(warm) if "lr" in row] == [5, 6]


def test_another_recipe_is_refused(folder: Path) -> None:
    done = automodel(folder, "pretrain", "llm", "-c", "quickstart")
    assert done.returncode == 2
    assert_error(done.stderr, "wrong_recipe", values=("quickstart", "pretrain", "SFTRecipe"))
