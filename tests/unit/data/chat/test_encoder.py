"""Which tokens of a conversation are trained, against the library's own mask and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.chat_template import resolve_chat_template
from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.encoding.encode_spec import EncodeSpec
from automodel_cli.data.encoding.row_encoder import RowEncoder
from automodel_cli.data.formats.builtin import FORMATS
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.formats.messages import read_messages
from automodel_cli.data.row_errors import RowError
from tests.errors import raises
from tests.unit.data.helpers import (
    FORGETS_REASONING,
    NATIVE,
    NO_SYSTEM,
    TAGGED,
    WITH_BOS,
    WITH_TOOLS,
    chat_row,
    tiny_tokenizer,
    trained_text,
    turn,
)

CHAT = chat_row("hello", "small text", "about", "chat")["messages"]


def conversation(messages, tools=None):
    read, trained = read_messages(messages, "messages")
    return Conversation(read, trained, tools)


def encode(template, messages, mask="assistant", tools=None, **options):
    tokenizer = tiny_tokenizer(template)
    (result,) = ChatEncoder(tokenizer, template, mask, **options).encode([conversation(messages, tools)])
    if isinstance(result, RowError):
        raise result
    return tokenizer, result


@pytest.mark.smoke
def test_the_two_ways_and_the_library_agree():
    tokenizer, by_tags = encode(TAGGED, CHAT)
    _, by_prefixes = encode(NATIVE, CHAT)
    reference = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    for encoded in (by_tags, by_prefixes):
        assert encoded.ids.tolist() == reference["input_ids"]
        assert encoded.trained.tolist() == reference["assistant_masks"]


@pytest.mark.parametrize("template", [TAGGED, NATIVE])
def test_the_end_of_turn_is_trained_and_the_newline_after_it_is_not(template):
    tokenizer, encoded = encode(template, CHAT)
    assert trained_text(tokenizer, encoded) == "small text<|im_end|>chat<|im_end|>"
    assert encoded.trained[-1] == 0 and tokenizer.decode(encoded.ids[-1:]) == "\n"


@pytest.mark.parametrize("template", [TAGGED, NATIVE])
def test_last_turn_all_and_train_false(template):
    tokenizer, last = encode(template, CHAT, "last_turn")
    assert trained_text(tokenizer, last) == "chat<|im_end|>"
    _, everything = encode(template, CHAT, "all")
    assert everything.trained.all()
    held_back = [*CHAT[:1], turn("assistant", "small text", train=False), *CHAT[2:]]
    _, encoded = encode(template, held_back)
    assert trained_text(tokenizer, encoded) == "chat<|im_end|>"
    _, rest = encode(template, held_back, "all")
    assert "small text" not in trained_text(tokenizer, rest) and "about" in trained_text(tokenizer, rest)
    _, openai = encode(template, [*CHAT[:1], turn("assistant", "small text", weight=0), *CHAT[2:]])
    assert np.array_equal(openai.trained, encoded.trained)


def test_bos_of_the_template_is_not_doubled():
    tokenizer = tiny_tokenizer(WITH_BOS, adds_bos=True)
    (encoded,) = ChatEncoder(tokenizer, WITH_BOS, "assistant").encode([conversation(CHAT)])
    assert encoded.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert encoded.ids[0] == tokenizer.bos_token_id


def test_a_template_that_rewrites_earlier_turns_makes_no_single_document():
    reasoned = chat_row("hello", "<think>hm</think>small text", "about", "<think>so</think>chat")["messages"]
    with raises(RowError, "not_a_prefix", values=("message 1",)) as caught:
        encode(FORGETS_REASONING, reasoned, turns="single")
    assert caught.value.fix.startswith("data.multi_turn=per_turn")
    tokenizer, last = encode(FORGETS_REASONING, reasoned, "last_turn")
    assert trained_text(tokenizer, last) == "<think>so</think>chat<|im_end|>"
    _, both = encode(FORGETS_REASONING, reasoned)
    said = [trained_text(tokenizer, document) for document in both.documents]
    assert said == ["<think>hm</think>small text<|im_end|>", "<think>so</think>chat<|im_end|>"]
    assert "hm" not in tokenizer.decode(both.documents[1].ids)


def test_a_token_over_the_edge_of_a_turn_is_cut_as_the_prompt_cuts_it():
    concatenated, row = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        chat_row("a sma", "ll text")["messages"],
    )
    with raises(RowError, "not_a_prefix", values=("start of message 1",)):
        encode(concatenated, row, turns="single")
    tokenizer, document = encode(concatenated, row)
    assert document.ids[document.trained == 0].tolist() == tokenizer("a sma")["input_ids"]
    assert trained_text(tokenizer, document) == "ll text<|im_end|>"


def test_rows_in_which_nothing_is_trained_are_refused():
    with raises(RowError, "no_label_token"):
        encode(NATIVE, CHAT[:1])
    with raises(RowError, "no_label_token", values=("train: false",)):
        encode(TAGGED, [CHAT[0], turn("assistant", "x", train=False)])


def test_what_the_template_leaves_out_is_refused():
    with raises(RowError, "dropped_by_template", values=("message 0", "'system'", "'be brief'")):
        encode(NO_SYSTEM, [turn("system", "be brief"), *CHAT])
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with raises(RowError, "tools_ignored", values=("'add'",)):
        encode(NATIVE, CHAT, tools=tools)
    tokenizer, encoded = encode(WITH_TOOLS, CHAT, tools=tools)
    assert '"name": "add"' in tokenizer.decode(encoded.ids)
    assert trained_text(tokenizer, encoded) == "small text<|im_end|>chat<|im_end|>"


def test_a_bad_row_does_not_spoil_its_batch():
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must start with user') }}{% endif %}" + TAGGED
    for template in (strict, strict.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        chats = [conversation(CHAT), conversation([turn("system", "x"), *CHAT]), conversation(CHAT)]
        first, bad, last = ChatEncoder(tiny_tokenizer(template), template, "assistant").encode(chats)
        assert bad.code == "template_error" and bad.message.endswith("must start with user")
        assert np.array_equal(first.ids, last.ids) and first.trained.any()


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompt_and_completion_without_a_template(adds_bos):
    tokenizer = tiny_tokenizer(None, adds_bos=adds_bos)
    rows = [{"prompt": "a small", "completion": " text"}, {"prompt": "a sma", "completion": "ll text"}]
    for mask, expected in (("assistant", (" text<|im_end|>", "ll text<|im_end|>")), ("all", None)):
        spec = EncodeSpec(FORMATS["prompt_completion"], {}, None, mask)
        for row, encoded, said in zip(
            rows, RowEncoder(tokenizer, spec).encode(rows), expected or ("", ""), strict=True
        ):
            bos = "<s>" if adds_bos else ""
            assert tokenizer.decode(encoded.ids) == f"{bos}{row['prompt']}{row['completion']}<|im_end|>"
            assert encoded.trained.all() if expected is None else trained_text(tokenizer, encoded) == said
        # the second row's completion begins inside a token of the whole text: both parts are encoded for themselves
        prompt = tokenizer(rows[1]["prompt"])["input_ids"]
        assert encoded.ids[: len(prompt)].tolist() == prompt


def test_plain_text_is_trained_whole_with_its_end():
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    (encoded,) = RowEncoder(tokenizer, EncodeSpec(FORMATS["text"], {}, None, "assistant")).encode(
        [{"text": "a small text"}]
    )
    assert tokenizer.decode(encoded.ids) == "<s>a small text<|im_end|>" and encoded.trained.all()


def test_chat_template_from_tokenizer_file_text_or_none(tmp_path):
    tokenizer = tiny_tokenizer(NATIVE)
    (tmp_path / "t.jinja").write_text(TAGGED)
    assert resolve_chat_template(None, tokenizer) == NATIVE
    assert resolve_chat_template("none", tokenizer) is None
    assert resolve_chat_template(TAGGED, tokenizer) == TAGGED
    assert resolve_chat_template(str(tmp_path / "t.jinja"), tokenizer) == TAGGED
    with raises(DataError, "missing_file", keys=("data.chat_template",), values=("missing.jinja",)):
        resolve_chat_template("missing.jinja", tokenizer)
