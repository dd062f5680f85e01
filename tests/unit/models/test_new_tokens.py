"""New tokens: rows of the embedding and the head against the mean of pieces in float64, exports, further training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp_config import MTPConfig
from automodel_cli.models.tokenizer import ByteTokenizer, PretrainedTokenizer, load_tokenizer
from tests.errors import raises
from tests.exports import verify_export
from tests.tiny import build_hf

SIZE = len(ByteTokenizer().build())
PLAIN, SPECIAL = ("<think>", "zebra"), ("<|plan|>",)


def model_folder(folder: Path, rows: int = SIZE, family: str = "llama", **fields) -> str:
    fields = {"num_hidden_layers": 1, **fields}
    build_hf(family, vocab_size=rows, **fields).save_pretrained(folder)
    ByteTokenizer().build().save_pretrained(folder)
    return str(folder)


def config_of(folder: str, **fields) -> ModelConfig:
    return ModelConfig(
        pretrained=folder,
        tokenizer=PretrainedTokenizer(**{"add_tokens": PLAIN, "add_special_tokens": SPECIAL, **fields}),
    )


def loaded(config: ModelConfig) -> ModelPart:
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    return part


def tables(model) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def expected(folder: str, table: torch.Tensor, token: str) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(folder)(token)["input_ids"]
    return table[ids].double().mean(0).float()


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_the_mean_of_the_pieces(tied: bool, tmp_path: Path):
    folder = model_folder(tmp_path, tie_word_embeddings=tied)
    config = config_of(folder)
    part, tokenizer = loaded(config), load_tokenizer(config)
    rows = -(-(SIZE + 3) // 64) * 64
    assert part.model.config.vocab_size == part.source_config.vocab_size == rows
    assert (tables(part.model)[0] is tables(part.model)[1]) == tied
    for old, new in zip(tables(AutoModelForCausalLM.from_pretrained(folder)), tables(part.model), strict=True):
        assert torch.equal(new[:SIZE], old)
        for token in (*PLAIN, *SPECIAL):
            (row,) = tokenizer(token)["input_ids"]
            assert row >= SIZE
            assert torch.allclose(new[row], expected(folder, old, token), atol=1e-7)
        mean = old.double().mean(0).float()
        assert torch.allclose(new[SIZE + 3 :], mean.expand(rows - SIZE - 3, -1), atol=1e-7)


def test_unused_rows_of_the_checkpoint_are_used_first(tmp_path: Path):
    folder = model_folder(tmp_path, SIZE + 5)
    part = loaded(config_of(folder, init_new_tokens="mean"))
    for old, new in zip(tables(AutoModelForCausalLM.from_pretrained(folder)), tables(part.model), strict=True):
        assert new.shape == old.shape
        mean = old[:SIZE].double().mean(0).float()
        assert torch.allclose(new[SIZE : SIZE + 3], mean.expand(3, -1), atol=1e-7)
        assert torch.equal(new[SIZE + 3 :], old[SIZE + 3 :]) and torch.equal(new[:SIZE], old[:SIZE])


def test_the_export_grows_and_is_trained_further(tmp_path: Path, caplog):
    config = config_of(model_folder(tmp_path / "base"), pad_to_multiple_of=1)
    part = loaded(config)
    with torch.no_grad():
        for table in tables(part.model):
            table[SIZE:] += 0.25
    out = tmp_path / "out"
    export_hf([part], config, load_tokenizer(config), out)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == SIZE + 3
    assert verify_export(out, [part], [[SIZE, 1, SIZE + 2, SIZE + 1]]) < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("a <think> zebra<|plan|>")["input_ids"]
    assert set(ids) >= {SIZE, SIZE + 1, SIZE + 2} and len(tokenizer) == SIZE + 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a <think> zebra"
    assert "known_tokens" not in [record.code for record in caplog.records if hasattr(record, "code")]
    again = loaded(config_of(str(out)))
    assert "known_tokens" in [record.code for record in caplog.records if hasattr(record, "code")]
    assert all(map(torch.equal, tables(again.model), tables(part.model)))
    more = loaded(config_of(str(out), add_tokens=("<more>",), pad_to_multiple_of=1))
    for before, after in zip(tables(part.model), tables(more.model), strict=True):
        assert len(after) == SIZE + 4 and torch.equal(after[: SIZE + 3], before)
        assert torch.allclose(after[-1], expected(str(out), before, "<more>"), atol=1e-7)


def test_random_weights_keep_the_vocabulary_of_their_config(tmp_path: Path):
    ByteTokenizer().build().save_pretrained(tmp_path)
    fields = {"model_type": "llama", "vocab_size": SIZE + 3, "hidden_size": 64, "num_hidden_layers": 1}
    node = PretrainedTokenizer(pretrained=str(tmp_path), add_tokens=PLAIN)
    assert build_part(ModelConfig(config=fields, tokenizer=node)).model.config.vocab_size == SIZE + 3
    with raises(ConfigError, "missing_key", keys=("tokenizer.pretrained",)):
        load_tokenizer(ModelConfig(config=fields, tokenizer=PretrainedTokenizer(add_tokens=PLAIN)))


@pytest.mark.parametrize(("setting", "value"), [("mtp", MTPConfig()), ("gguf_file", "model.gguf")])
def test_what_new_rows_do_not_support(setting: str, value: object):
    with raises(ConfigError, "unsupported_combination", keys=("tokenizer.add_tokens", setting)):
        ModelConfig(pretrained="x", tokenizer=PretrainedTokenizer(add_tokens=PLAIN), **{setting: value})


@pytest.mark.parametrize("tokens", [("a", "a"), ("", "b"), ("  ",)])
def test_tokens_are_distinct_and_not_empty(tokens: tuple[str, ...]):
    with raises(ConfigError, "invalid_value", keys=("add_tokens", "add_special_tokens")):
        PretrainedTokenizer(add_tokens=tokens)


def test_a_further_tensor_of_the_size_of_a_table_is_rejected(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = model_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.shared_head.head.weight"] = torch.zeros(SIZE, 64)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, "not_supported_by_model", keys=("tokenizer.add_tokens",)):
        loaded(config_of(folder))


def test_a_multimodal_checkpoint_is_rejected(tmp_path: Path):
    from transformers import AutoConfig

    small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": SIZE}
    AutoConfig.for_model("gemma3", text_config=small).save_pretrained(tmp_path)
    ByteTokenizer().build().save_pretrained(tmp_path)
    with raises(ConfigError, "not_supported_by_model", keys=("tokenizer.add_tokens",)):
        build_part(config_of(str(tmp_path)))
