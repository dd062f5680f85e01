"""`automodel finetune classifier`: transformers loads the export with equal scores, padded batches included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer, pipeline

from tests.e2e.command import TINY, automodel, curve, metrics
from tests.errors import assert_error
from tests.pages import undocumented_metrics

pytestmark = pytest.mark.slow

REVIEWS = "{{_target_: automodel_cli.data.synthetic.review_tasks.ReviewTasks, num_train: 200, num_validation: 24}}"
CONFIG = TINY.replace("[sft, _self_]", "[classifier, _self_]").replace(
    "generator: {{_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 400, num_validation: 16}}",
    f"generator: {REVIEWS}",
)
CONFIG += "objective: {{labels: [negative, mixed, positive]}}\n"
STEPS = ("train.max_steps=4", "logging.report=false", "data.seq_len=96", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    (folder / "reviews.yaml").write_text(CONFIG.format(family="llama"))
    return folder


def train(folder: Path, name: str, *overrides: str) -> list[float]:
    command = ("finetune", "classifier", "-c", "reviews.yaml", f"run_name={name}", *STEPS, *overrides)
    done = automodel(folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not undocumented_metrics(folder / "runs" / name)
    return curve(folder / "runs" / name)


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    return train(folder, "whole")


def test_the_export_gives_the_validation_metrics_in_padded_batches(folder, losses):
    from automodel_cli.data.synthetic.review_tasks import ReviewTasks

    assert losses[0] == pytest.approx(1.098612, abs=1e-6)  # ln 3
    export, rows = (
        folder / "runs" / "whole" / "export",
        [*ReviewTasks(num_train=200, num_validation=24).rows("validation")],
    )
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert model.config.id2label == {0: "negative", 1: "mixed", 2: "positive"}
    assert model.config.problem_type == "single_label_classification"
    texts = [row["text"] for row in rows]
    with torch.no_grad():
        padded = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        single = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    assert torch.allclose(padded, single, atol=1e-5)
    wanted = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    last = metrics(folder / "runs" / "whole")[-1]
    assert last["val_loss"] == pytest.approx(torch.nn.functional.cross_entropy(padded, wanted).item(), abs=1e-5)
    assert last["val_accuracy"] == (padded.argmax(1) == wanted).float().mean().item()
    found = pipeline("text-classification", str(export), batch_size=8)(texts)
    assert [answer["label"] for answer in found] == [model.config.id2label[i] for i in padded.argmax(1).tolist()]


def test_a_second_run_starts_from_the_first_ones_scores(folder, losses):
    """Also with the labels in another order."""
    export = ("model.config=null", "model.pretrained=runs/whole/export", "objective.labels=[positive,negative,mixed]")
    train(folder, "second", *export, "train.max_steps=1")
    before, after = metrics(folder / "runs" / "second")[0], metrics(folder / "runs" / "whole")[-1]
    names = ("val_loss", "val_accuracy", "val_f1", "val_auroc")
    assert before["step"] == 0
    assert [before[name] for name in names] == pytest.approx([after[name] for name in names], rel=1e-6)


def test_stages_and_ranks_train_the_same_classifier(folder, losses):
    staged = train(folder, "stages", "mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b")
    assert staged == pytest.approx(losses, rel=2e-6)
    last = [metrics(folder / "runs" / name)[-1] for name in ("whole", "stages")]
    assert last[1] == pytest.approx(last[0], rel=1e-5)


def test_a_padding_token_that_is_eos_pools_right(folder, losses):
    """Llama's tokenizers have no padding token, so that exports pad with EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs" / "whole" / "export")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder / "unpadded")
    node = "{_target_: automodel_cli.models.tokenizer.PretrainedTokenizer, pretrained: unpadded}"
    train(folder, "eos", f"model.tokenizer={node}")
    export = folder / "runs" / "eos" / "export"
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(export).eval(),
        AutoTokenizer.from_pretrained(export),
    )
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id
    texts = ["the soup was good", "the very long tour was not really bad and the bed was fine"]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        padded = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        single = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        assert torch.allclose(padded, single, atol=1e-5), side


def test_tokens_with_lora_export_a_token_classifier(folder):
    rows = [{"tokens": ["call", name, "now"], "tags": ["O", "NAME", "O"]} for name in ("Zoe", "Max", "Ann", "Lee") * 16]
    (folder / "names.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data.generator=null", "data.path=names.jsonl", "data.validation_size=8")
    train(folder, "tokens", *data, "objective={labels: [O, NAME], token_level: true}", "model.lora={rank: 4}")
    export = folder / "runs" / "tokens" / "export"
    model, tokenizer = (
        AutoModelForTokenClassification.from_pretrained(export).eval(),
        AutoTokenizer.from_pretrained(export),
    )
    assert model(**tokenizer("call Zoe now", return_tensors="pt")).logits.shape[-1] == 2
    assert metrics(folder / "runs" / "tokens")[-1]["val_num_examples"] > 8


def test_other_objectives_and_recipes_are_refused(folder):
    done = automodel(folder, "check", "-c", "reviews.yaml", "objective=reward", "~objective.labels")
    assert done.returncode == 2
    assert_error(done.stderr, "not_supported", "objective")
    done = automodel(folder, "finetune", "classifier", "-c", "quickstart_rm")
    assert_error(done.stderr, "wrong_recipe", values=("quickstart_rm", "classifier"))
    (folder / "other.jsonl").write_text(json.dumps({"text": "good", "label": "great"}) + "\n")
    done = automodel(folder, "check", "-c", "reviews.yaml", "data.generator=null", "data.path=other.jsonl")
    assert done.returncode == 0, done.stderr
    command = ("finetune", "classifier", "-c", "reviews.yaml", "data.generator=null", "data.path=other.jsonl")
    done = automodel(folder, *command)
    assert done.returncode == 3
    assert_error(done.stderr, "bad_rows", values=("'great'", "negative"))
