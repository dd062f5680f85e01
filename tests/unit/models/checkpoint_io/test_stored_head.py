"""A second fine-tune of classifiers and embedding models: the head of the checkpoint, as transformers writes it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import one_document
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead
from tests.errors import raises
from tests.tiny import perturb, tiny_config

LABELS = ("bad", "so so", "good")
SINGLE = "single_label_classification"
FLAGS = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
IDS = list(range(3, 20))


def saved(folder: Path, auto=AutoModelForSequenceClassification, *, biased: bool = False, **fields) -> nn.Module:
    """A model that transformers has written, with an untied head if it had one. Returns it in eval mode."""
    model = auto.from_config(tiny_config("llama", num_hidden_layers=2, tie_word_embeddings=False, **fields))
    perturb(model, 3)
    if not biased and getattr(getattr(model, "score", None), "bias", None) is not None:
        nn.init.zeros_(model.score.bias)
    model.save_pretrained(folder)
    return model.eval()


def loaded(folder: Path, head: ScoreHead | EmbeddingHead | None) -> ModelPart:
    config, request = ModelConfig(pretrained=str(folder)), HeadRequest()
    if head is not None:
        is_score = isinstance(head, ScoreHead)
        request = HeadRequest(scores=head.num_outputs if is_score else 0, hidden=not is_score, logprobs=False)
    part = build_part(config, request=request)
    load_weights(part, config, device="cpu", seed=0, score_head=head)
    return part


def outputs(part: ModelPart, request: HeadRequest) -> Tensor:
    batch = one_document(IDS)
    output = part(**batch.head_inputs(request), **batch.model_inputs())
    return (output.scores_BTL if request.scores else output.hidden_BTD)[0]


def named(labels) -> dict:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def test_equal_labels_continue_from_the_head_bit_for_bit(tmp_path: Path, caplog):
    theirs = saved(tmp_path, **named(LABELS))
    part = loaded(tmp_path, ScoreHead(LABELS, SINGLE))
    stored = load_file(tmp_path / "model.safetensors")["score.weight"]
    assert part.value_head is not None and torch.equal(part.value_head.weight, stored)
    with torch.no_grad():
        ours = outputs(part, HeadRequest(scores=3, logprobs=False))[-1]
        assert torch.allclose(ours, theirs(torch.tensor([IDS])).logits[0], atol=1e-5)
    assert not caplog.records


def test_labels_are_compared_by_name_and_invented_names_by_number(tmp_path: Path, caplog):
    theirs = saved(tmp_path / "named", **named(LABELS))
    other_order = loaded(tmp_path / "named", ScoreHead(("good", "bad", "so so"), SINGLE))
    assert torch.equal(other_order.value_head.weight, theirs.score.weight[[2, 0, 1]])
    theirs = saved(tmp_path / "numbers", num_labels=3)
    assert torch.equal(loaded(tmp_path / "numbers", ScoreHead(LABELS, SINGLE)).value_head.weight, theirs.score.weight)
    theirs = saved(tmp_path / "reward", num_labels=1)
    assert torch.equal(loaded(tmp_path / "reward", ScoreHead()).value_head.weight, theirs.score.weight)
    theirs = saved(tmp_path / "tokens", AutoModelForTokenClassification, **named(LABELS))
    of_tokens = loaded(tmp_path / "tokens", ScoreHead(LABELS, SINGLE, of_tokens=True))
    assert torch.equal(of_tokens.value_head.weight, theirs.score.weight)
    assert not caplog.records


@pytest.mark.parametrize(
    ("auto", "options", "head"),
    [
        (AutoModelForSequenceClassification, {}, ScoreHead((*LABELS, "new"), SINGLE)),
        (AutoModelForSequenceClassification, {}, ScoreHead(("a", "b", "c"), SINGLE)),
        (AutoModelForSequenceClassification, {}, ScoreHead()),
        (AutoModelForSequenceClassification, {}, ScoreHead(LABELS, SINGLE, of_tokens=True)),
        (AutoModelForTokenClassification, {"biased": True}, ScoreHead(LABELS, SINGLE, of_tokens=True)),
    ],
)
def test_another_head_starts_at_zero_with_a_warning(auto, options, head, tmp_path: Path, caplog):
    saved(tmp_path, auto, **options, **named(LABELS))
    with caplog.at_level(logging.WARNING):
        part = loaded(tmp_path, head)
    assert part.value_head is not None and not part.value_head.weight.any()
    assert [record.code for record in caplog.records] == ["new_score_layer"]


def test_an_embedding_model_without_a_language_head_trains_further(tmp_path: Path):
    theirs = saved(tmp_path, AutoModel)  # without the prefix `model.`, as published embedding models
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    part = loaded(tmp_path, EmbeddingHead())
    assert not part.model.lm_head.weight.any() and not part.model.lm_head.weight.requires_grad
    with torch.no_grad():
        ours = outputs(part, HeadRequest(hidden=True, logprobs=False))
        assert torch.allclose(ours, theirs(torch.tensor([IDS])).last_hidden_state[0], atol=1e-5)
    with raises(ConfigError, "weights_mismatch", keys=("pretrained",), values=("lm_head.weight",)):
        loaded(tmp_path, None)


def test_a_tied_head_is_never_zero(tmp_path: Path):
    model = AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    part = loaded(tmp_path, EmbeddingHead())
    assert torch.equal(part.model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("pooling", [FLAGS, {"pooling_mode": "lasttoken"}])
def test_other_settings_of_an_embedding_model_are_a_warning(pooling: dict, tmp_path: Path, caplog):
    saved(tmp_path, AutoModel)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    prompts = {"prompts": {"query": "question: ", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path, EmbeddingHead("last", "question: ", ""))
        assert not caplog.records
        loaded(tmp_path, EmbeddingHead("mean", "question: ", "passage: "))
    (record,) = caplog.records
    assert record.code == "other_embedding_settings"
    assert "objective.pooling is lasttoken" in record.getMessage() and "passage_prompt is ''" in record.getMessage()
