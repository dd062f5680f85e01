"""`automodel finetune embedding`: sentence-transformers loads the export with equal embeddings and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.command import TINY, automodel, curve, metrics
from tests.errors import assert_error
from tests.pages import undocumented_metrics

pytestmark = pytest.mark.slow

SEARCH = "{{_target_: automodel_cli.data.synthetic.search_tasks.SearchTasks, num_train: 120, num_validation: 24}}"
CONFIG = TINY.replace("[sft, _self_]", "[embedding, _self_]").replace(
    "generator: {{_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 400, num_validation: 16}}",
    f"generator: {SEARCH}",
)
CONFIG += "query_prompt: 'question: '\nmax_tokens: 64\n"
STEPS = ("train.max_steps=4", "logging.report=false", "data.seq_len=256", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    (folder / "search.yaml").write_text(CONFIG.format(family="llama"))
    return folder


def train(folder: Path, name: str, *overrides: str) -> list[float]:
    command = ("finetune", "embedding", "-c", "search.yaml", f"run_name={name}", *STEPS, *overrides)
    done = automodel(folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not undocumented_metrics(folder / "runs" / name)
    return curve(folder / "runs" / name)


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    return train(folder, "whole")


def check_with_sentence_transformers(folder: Path, name: str) -> None:
    """Equal held-out metrics from `encode_query` and `encode_document` in padded batches."""
    sentence_transformers = pytest.importorskip("sentence_transformers")  # of the extra `dev`
    from automodel_cli.data.synthetic.search_tasks import SearchTasks

    rows = [*SearchTasks(num_train=120, num_validation=24).rows("validation")]
    model = sentence_transformers.SentenceTransformer(str(folder / "runs" / name / "export"), device="cpu")
    queries = [row["query"] for row in rows]
    passages = [text for row in rows for text in (row["positive"], *row["negatives"])]
    embedded = model.encode_query(queries, batch_size=8, convert_to_tensor=True)
    assert torch.allclose(embedded.norm(dim=1), torch.ones(len(rows)), atol=1e-5)
    scores = embedded @ model.encode_document(passages, batch_size=8, convert_to_tensor=True).T
    own = scores.gather(1, torch.tensor([[passages.index(row["positive"])] for row in rows]))
    wrong = torch.tensor([[text != row["positive"] for text in passages] for row in rows])
    last = metrics(folder / "runs" / name)[-1]
    for k in (1, 10):
        recall = (((scores >= own) & wrong).sum(1) < k).float().mean()
        assert last[f"val_recall_at_{k}"] == pytest.approx(recall.item(), abs=1e-6)
    logits = (scores / 0.05).masked_fill(~wrong, float("-inf"))
    expected = (torch.cat([own / 0.05, logits], 1).logsumexp(1) - own[:, 0] / 0.05).mean()
    assert last["val_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_sentence_transformers_gives_the_validation_metrics(folder, losses):
    check_with_sentence_transformers(folder, "whole")
    export = folder / "runs" / "whole" / "export"
    prompts = json.loads((export / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {"query": "question: ", "document": ""}
    assert json.loads((export / "sentence_bert_config.json").read_text())["max_seq_length"] == 64
    names = (export / "model.safetensors").read_bytes()[:100_000]
    assert b"lm_head" not in names


def test_mean_pooling_lora_and_stages_export_too(folder, losses):
    more = ("objective.pooling=mean", "objective.dimensions=[64,16]", "model.lora={rank: 4}")
    staged = ("mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b")
    assert train(folder, "mean", *more) == pytest.approx(train(folder, "stages", *more, *staged), rel=2e-5)
    sentence_transformers = pytest.importorskip("sentence_transformers")
    models = [
        sentence_transformers.SentenceTransformer(str(folder / "runs" / name / "export"), device="cpu")
        for name in ("mean", "stages")
    ]
    texts = ["baker from Rome", "Ann lives in Lima, plays chess and makes bread"]
    whole, staged_embeddings = (model.encode(texts, convert_to_tensor=True) for model in models)
    assert torch.allclose(whole, staged_embeddings, atol=1e-4)


def test_scored_pairs_have_a_rank_correlation(folder):
    rows = [{"query": f"a {i}", "positive": f"b {i % 7}", "score": (i % 7) / 7} for i in range(64)]
    (folder / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data.generator=null", "data.path=scored.jsonl", "data.validation_size=16")
    train(folder, "scored", *data, "objective=cosine_score")
    assert "val_spearman" in metrics(folder / "runs" / "scored")[-1]
    done = automodel(folder, "finetune", "embedding", "-c", "search.yaml", *data)
    assert done.returncode == 3
    assert_error(done.stderr, "bad_rows", values=("objective=cosine_score",))


def test_what_cannot_work_is_refused_before_anything_is_built(folder):
    for override, code, key in (
        ("objective=reward", "not_supported", "objective"),
        ("objective.pooling=cls", "not_supported", "objective.pooling"),
        ("model.lora={rank: 4, dropout: 0.1}", "unsupported_combination", "model.lora.dropout"),
        ("data.truncation=truncate", "unsupported_combination", "data.truncation"),
    ):
        done = automodel(folder, "check", "-c", "search.yaml", override)
        assert done.returncode == 2
        assert_error(done.stderr, code, key)
    done = automodel(folder, "finetune", "embedding", "-c", "search.yaml", *STEPS, "objective.dimensions=[128]")
    assert done.returncode == 2
    assert_error(done.stderr, "out_of_range", "objective.dimensions", fix="objective.dimensions=[64]")
