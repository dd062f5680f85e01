"""Token ids beyond the embedding, beside what torch's own lookup accepts."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.prompts import prepare_prompts
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.run.checks.token_ids import check_prepared, check_tokens
from tests.errors import raises

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizer():
    built = ByteTokenizer(words=()).build()
    built.add_tokens(["<|tool|>", "<|more|>"])
    return built


def rows_of(tokenizer):
    """As many as the ids without the last token."""
    return len(tokenizer) - 1


def model(tokenizer, **options):
    fields = {"model_type": "llama", "vocab_size": rows_of(tokenizer), **SMALL}
    return ModelConfig(config=fields, tokenizer=ByteTokenizer(words=()), **options)


def prepared(tmp_path, tokenizer, *, train=(), validation=(), kind=prepare_data, **options):
    for name, texts in (("train", train), ("validation", validation)):
        lines = [json.dumps({"prompt": "add 1 and 2", "completion": f"3 {text}"}) for text in ("", *texts)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    paths = {"path": str(tmp_path / "train.jsonl"), "validation_path": str(tmp_path / "validation.jsonl")}
    config = DataConfig(**paths, seq_len=64, cache_dir=str(tmp_path / "cache"), special_tokens_policy="keep")
    return kind(config, tokenizer, seed=0, **options)


@pytest.mark.parametrize("where", ["train", "validation"])
def test_a_token_without_a_row_is_named_with_its_line_before_the_run(tmp_path, tokenizer, where):
    found = prepared(tmp_path, tokenizer, **{where: ["<|more|>"]})
    with pytest.raises(IndexError):
        torch.nn.Embedding(rows_of(tokenizer), 2)(torch.tensor([getattr(found, where).largest_id()[0]]))
    with pytest.raises(ConfigError) as caught:
        check_prepared(found, tokenizer, model(tokenizer))
    error = caught.value
    assert "<|more|>" in error.message and f"{where}.jsonl:2" in error.message
    assert str(len(tokenizer) - 1) in error.message and str(rows_of(tokenizer)) in error.message
    key, size = error.fix.split("=")
    assert key == "model.config.vocab_size" and key in error.keys
    fixed = ModelConfig(config={"model_type": "llama", "vocab_size": int(size), **SMALL}, tokenizer=ByteTokenizer())
    check_prepared(found, tokenizer, fixed)


def test_tokens_that_the_rows_do_not_hold_are_no_reason_to_refuse(tmp_path, tokenizer):
    check_prepared(prepared(tmp_path, tokenizer, train=["<|tool|>"]), tokenizer, model(tokenizer))


def test_prompts_and_questions_are_compared_too(tmp_path, tokenizer):
    config = model(tokenizer)
    prompts = prepared(tmp_path, tokenizer, kind=prepare_prompts, max_tokens=40)
    check_prepared(prompts, tokenizer, config)
    prompts.train.prompts[0].tokens.append(len(tokenizer) - 1)
    with raises(ConfigError, "vocabulary_mismatch", values=("train.jsonl:1",)):
        check_prepared(prompts, tokenizer, config)
    with raises(ConfigError, "vocabulary_mismatch", values=("b.jsonl:7", len(tokenizer) - 1)):
        check_tokens([("a.jsonl:1", [3]), ("b.jsonl:7", [len(tokenizer) - 1])], "task's", tokenizer, config)


def test_padding_without_a_row_becomes_a_token_that_has_one(tmp_path, tokenizer):
    tokenizer = ByteTokenizer(words=()).build()
    tokenizer.add_special_tokens({"pad_token": "<|new pad|>"})
    found = prepared(tmp_path, tokenizer)
    assert found.train.pad_id == len(tokenizer) - 1
    check_prepared(found, tokenizer, model(tokenizer))
    for dataset in (found.train, found.validation):
        assert dataset.collate([0]).input_ids_BT.max() < rows_of(tokenizer)


def test_the_command_that_is_offered_for_a_pretrained_model_makes_one_that_fits(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(LlamaConfig(vocab_size=rows_of(tokenizer), **SMALL)).save_pretrained("it's small")
    tokenizer.save_pretrained("it's small")
    found = prepared(tmp_path, tokenizer, train=["<|more|>"])
    with pytest.raises(ConfigError) as caught:
        check_prepared(found, tokenizer, ModelConfig(pretrained="it's small"))
    command, _, note = caught.value.fix.partition("   (then ")
    python, flag, code = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    exec(code, {})
    larger = note.rstrip(")").removeprefix("model.pretrained=")
    check_prepared(found, tokenizer, ModelConfig(pretrained=larger))
    before, after = (
        AutoModelForCausalLM.from_pretrained(name).get_input_embeddings().weight for name in ("it's small", larger)
    )
    assert torch.equal(before, after[: rows_of(tokenizer)])
