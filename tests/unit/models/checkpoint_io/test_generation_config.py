"""Generation settings of an export, as `transformers` reads them back; what the training rows teach to stop at."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.tokenizer import END, PAD, ByteTokenizer
from tests.tiny import build_hf

SOURCE = {"eos_token_id": [2, 7], "temperature": 0.7, "do_sample": False, "of_a_later_version": {"a": 1}}


def exported(tmp_path, stop_ids, settings):
    """The generation config that stock transformers finds in an export, and the fields of its file."""
    build_hf("llama").save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "generation_config.json"
    file.unlink(missing_ok=True)
    if settings is not None:
        file.write_text(json.dumps(settings))
    config = ModelConfig(pretrained=str(tmp_path / "hub"))
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    export_hf([part], config, None, tmp_path / "out", stop_ids=stop_ids)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    return model.generation_config, json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_the_sources_settings_are_kept_field_by_field(tmp_path):
    read, fields = exported(tmp_path, [7, 2], SOURCE)
    assert fields == SOURCE and read.eos_token_id == [2, 7] and read.temperature == 0.7


@pytest.mark.parametrize("settings", [SOURCE, {"eos_token_id": 2}, {}, None])
def test_trained_stop_tokens_come_after_the_sources(tmp_path, settings):
    """Of a source without the file, or without stops in it, the model's config names one: 2."""
    read, fields = exported(tmp_path, [9], settings)
    assert read.eos_token_id == ([2, 7, 9] if settings is SOURCE else [2, 9])
    assert {**fields, "eos_token_id": None}.items() >= {**(settings or {}), "eos_token_id": None}.items()


def base_tokenizer():
    """One that was taught no chat: its EOS is not what its template ends a turn with."""
    tokenizer = ByteTokenizer(words=()).build()
    tokenizer.eos_token = PAD
    return tokenizer


QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "preferences", "stop"),
    [
        ({"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, False, END),
        ({"text": f"a{END}b"}, False, PAD),
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "c"}]}, True, END),
    ],
)
def test_what_ends_the_trained_turns_is_a_stop_token(tmp_path, row, preferences, stop):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), seq_len=64, cache_dir=str(tmp_path / "cache"))
    tokenizer = base_tokenizer()
    rows = prepare_data(config, tokenizer, seed=0, preferences=preferences).train
    assert rows.taught_stops() == [tokenizer.convert_tokens_to_ids(stop)]


def test_a_token_that_ends_a_turn_in_two_hundred_is_none(tmp_path):
    text = [{"messages": [QUESTION, ANSWER]}] * 199 + [{"messages": [QUESTION, {"role": "assistant", "content": "c"}]}]
    ends = "{% if m.content == 'c' %}<|tool|>{% else %}<|end|>{% endif %}"
    odd = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + ends + "{% endfor %}"
    odd += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, text)) + "\n")
    config = DataConfig(
        path=str(tmp_path / "rows.jsonl"), seq_len=64, cache_dir=str(tmp_path / "cache"), chat_template=odd
    )
    tokenizer = base_tokenizer()
    rows = prepare_data(config, tokenizer, seed=0).train
    assert [token for token, _ in rows.stores[0].meta["turn_ends"]] == tokenizer.convert_tokens_to_ids(
        [END, "<|tool|>"]
    )
    assert rows.taught_stops() == [tokenizer.convert_tokens_to_ids(END)]
