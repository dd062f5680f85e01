"""vLLM's scores, reward and embeddings of exports, beside those of transformers and sentence-transformers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from tests.e2e.command import TINY, automodel

ROOT = Path(__file__).parents[2]
VLLM = os.environ.get("AUTOMODEL_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM, reason="AUTOMODEL_VLLM names no environment with vLLM"),
    pytest.mark.timeout(1200),
]

WORDS = ("the soup", "the bed", "a long tour", "the kind staff", "this film")
TEXTS = [f"{subject} was {kind}" for subject in WORDS for kind in ("good", "bad", "not really bad", "fine")]
HEADS = ("num_attention_heads=2", "num_key_value_heads=2", "head_dim=32")  # vLLM's CPU kernels know 32
FINE, BAD = ["good" in text or "fine" in text for text in TEXTS], ["bad" in text for text in TEXTS]

RUNS: dict[str, tuple[str, str, list[dict[str, Any]], tuple[str, ...]]] = {
    "classes": (
        "finetune classifier",
        "classify",
        [{"text": text, "label": "bad" if bad else "good"} for text, bad in zip(TEXTS, BAD, strict=True)],
        ("objective.labels=[bad,good]",),
    ),
    "labels": (
        "finetune classifier",
        "classify",
        [
            {"text": text, "label": [name for name, is_it in (("fine", fine), ("bad", bad)) if is_it]}
            for text, fine, bad in zip(TEXTS, FINE, BAD, strict=True)
        ],
        ("objective=multi_label", "objective.labels=[fine,bad]"),
    ),
    "number": (
        "finetune classifier",
        "classify",
        [{"text": text, "label": len(text) / 10} for text in TEXTS],
        ("objective=regression", "objective.labels=[length]"),
    ),
    "tokens": (
        "finetune classifier",
        "token_classify",
        [{"tokens": text.split(), "tags": ["O" if len(w) < 4 else "LONG" for w in text.split()]} for text in TEXTS],
        ("objective={labels: [O, LONG], token_level: true}",),
    ),
    "reward": (
        "rm llm",
        "classify",
        [{"prompt": "How was it?", "chosen": text, "rejected": text[::-1]} for text in TEXTS],
        (),
    ),
    "last": ("finetune embedding", "embed", [{"query": text[:-3], "positive": text} for text in TEXTS], ()),
    "mean": (
        "finetune embedding",
        "embed",
        [{"query": text[:-3], "positive": text} for text in TEXTS],
        ("objective.pooling=mean",),
    ),
}


def train(folder: Path, name: str) -> None:
    command, _, rows, overrides = RUNS[name]
    recipe = command.split()[-1] if command.startswith("finetune") else "rm"
    config = TINY.format(family="qwen3").replace("[sft, _self_]", f"[{recipe}, _self_]")
    start, end = config.index("  generator:"), config.index("  seq_len:")
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(f"{config[:start]}  path: {name}.jsonl\n{config[end:]}")
    heads = [f"model.config.{field}" for field in HEADS]
    more = ("train.max_steps=6", "optimizer.lr=1e-2", "data.seq_len=128", "logging.report=false")
    done = automodel(folder, *command.split(), "-c", f"{name}.yaml", f"run_name={name}", *heads, *more, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pooling")
    for name in RUNS:
        train(folder, name)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict[str, Any]]:
    asked = {name: (str(folder / "runs" / name / "export"), RUNS[name][1], TEXTS) for name in RUNS}
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # seven engines one after another
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [f"{VLLM}/bin/python", "-m", "tests.vllm.pool", folder / "asked.json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return found


@torch.no_grad()
def scores(export: Path, auto: Any) -> list[Tensor]:
    """Of one text at a time, without padding."""
    model, tokenizer = auto.from_pretrained(export, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(export)
    return [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]


def gap(found: list[Any], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max((torch.tensor(one).reshape(other.shape) - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("classes", lambda logits: logits.softmax(-1)),
        ("labels", torch.sigmoid),
        ("number", lambda logits: logits),
        ("reward", torch.sigmoid),
    ],
)
def test_scores_and_probabilities(folder: Path, answers: Any, name: str, activation: Callable[[Tensor], Tensor]):
    wanted, found = scores(folder / "runs" / name / "export", AutoModelForSequenceClassification), answers[name]
    assert max(one.abs().max().item() for one in wanted) > 0.1, "the test shows nothing: scores are zero"
    assert gap(found["values"], wanted) < 1e-5
    assert gap(found["probs"], [activation(one) for one in wanted]) < 1e-5


def test_scores_of_every_token(folder: Path, answers: Any):
    wanted = scores(folder / "runs" / "tokens" / "export", AutoModelForTokenClassification)
    assert gap(answers["tokens"]["values"], wanted) < 1e-5


@pytest.mark.parametrize("name", ["last", "mean"])
def test_embeddings(folder: Path, answers: Any, name: str):
    sentence_transformers = pytest.importorskip("sentence_transformers")  # of the extra `dev`
    model = sentence_transformers.SentenceTransformer(str(folder / "runs" / name / "export"), device="cpu")
    wanted = model.encode_document(TEXTS, batch_size=8, convert_to_tensor=True)
    assert gap(answers[name]["values"], [*wanted]) < 1e-5


@pytest.mark.parametrize("name", RUNS)
def test_texts_have_the_tokens_of_the_exported_tokenizer(folder: Path, answers: Any, name: str):
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs" / name / "export")
    assert answers[name]["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS]
