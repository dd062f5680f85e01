"""`automodel eval` of a run of the real command line, against transformers' own generation and log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import automodel, cold, write_config

CHOICES = [
    {"question": "Give the larger of 64 and 29.", "choices": ["64", "29"], "answer": 0},
    {"question": "Say UQ again.", "choices": ["QU", "UQ", "no"], "answer": "UQ"},
    {"question": "What is 2 + 3?", "choices": ["5", "6", "77"], "answer": "6"},
]
EVAL = """
_target_: automodel_cli.evaluation.config.EvalConfig
num_resamples: 500
tasks:
  answers:
    _target_: automodel_cli.evaluation.config.Generation
    max_new_tokens: 12
  samples:
    _target_: automodel_cli.evaluation.config.Generation
    data: {path: held_out.jsonl, seq_len: 64}
    num_samples: 3
    temperature: 1.0
    pass_at: [1, 3]
    max_new_tokens: 4
  choices: {_target_: automodel_cli.evaluation.config.MultipleChoice, path: choices.jsonl}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    write_config(folder)
    (folder / "eval.yaml").write_text(EVAL)
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    rows = [
        {"messages": [{"role": "user", "content": c["question"]}, {"role": "assistant", "content": c["choices"][0]}],
         "answer": c["choices"][0]}
        for c in CHOICES
    ]  # fmt: skip
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = automodel(folder, "tiny.yaml", "train.max_steps=12", "data.task.num_validation=5", "optimizer.lr=0.01")
    assert done.returncode == 0, done.stderr
    done = automodel(folder, "eval", "tiny", "-c", "eval.yaml")
    assert done.returncode == 0, done.stderr
    assert "answers: accuracy" in done.stdout and "tiny (step 12) minus before" in done.stdout
    return folder


def results(folder: Path, label: str = "tiny (step 12)") -> dict[str, Any]:
    return json.loads((folder / "runs/tiny/eval/eval.json").read_text())["models"][label]


def loaded(folder: Path) -> tuple[Any, Any]:
    export = folder / "runs/tiny/export"
    return AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)


def prompt(tokenizer: Any, question: str) -> torch.Tensor:
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def test_greedy_answers_are_those_of_transformers(home: Path) -> None:
    tokenizer, model = loaded(home)
    found = results(home)["answers"]
    assert len(found["items"]) == 5
    for item, right in zip(found["items"], found["measures"]["accuracy"], strict=True):
        encoded = prompt(tokenizer, item["question"])
        said = model.generate(**encoded, max_new_tokens=12, do_sample=False)[0, encoded["input_ids"].shape[1] :]
        text = tokenizer.decode(said, skip_special_tokens=True)
        assert item["responses"] == [text]
        assert right == float(text == item["answer"] and said[-1] == tokenizer.eos_token_id)


def test_choices_are_scored_by_the_log_probs_of_their_tokens(home: Path) -> None:
    tokenizer, model = loaded(home)
    found = results(home)["choices"]
    for row, item, right in zip(CHOICES, found["items"], found["measures"]["accuracy"], strict=True):
        prefix = prompt(tokenizer, row["question"])["input_ids"][0].tolist()
        wanted = []
        for choice in row["choices"]:
            ids = tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([prefix + ids])).logits.log_softmax(-1)[0]
            wanted.append(sum(logprobs[len(prefix) - 1 + i, token].item() for i, token in enumerate(ids)))
        assert item["scores"] == pytest.approx(wanted, abs=1e-4)
        best = row["choices"][wanted.index(max(wanted))]
        assert item["chosen"] == best and right == float(best == item["answer"])


def test_before_is_what_the_run_began_with_and_the_report_shows_the_scores(home: Path) -> None:
    assert results(home, "before")["choices"] != results(home)["choices"]
    page = (home / "runs/tiny/report.html").read_text()
    assert "<h2>Evaluations</h2>" in page and "<td>samples: pass@3</td>" in page


@pytest.mark.slow
def test_two_ranks_find_what_one_found(home: Path) -> None:
    """Samples too: a question's seeds are its own, whoever asks it."""
    one = results(home)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = cold(home, "eval", "tiny", "-c", "eval.yaml", "--alone", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    two = results(home)
    assert two["answers"] == one["answers"] and two["samples"] == one["samples"]
    for a, b in zip(one["choices"]["items"], two["choices"]["items"], strict=True):
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-4)
