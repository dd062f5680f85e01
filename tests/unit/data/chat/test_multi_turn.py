"""Conversations under the templates of the hub: each trained turn stands after what the model sees at inference and
ends with the token that ends generation, or the row is refused for a reason that is true.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import GenerationConfig, LlamaConfig

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.chat.chat_template import PROBES, choose_template, find_training_template, training_template
from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.multi_turn import reasoning_key, with_key
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.formats.messages import read_messages
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.prompts import prepare_prompts
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import Unrolled, split_documents
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.source import stop_ids
from tests.errors import raises
from tests.unit.data.helpers import TAGGED, chat_row, tiny_tokenizer, trained_text, turn, write_jsonl
from tests.unit.data.template_families import FAMILIES

USER, ANSWER = turn("user", "hello"), turn("assistant", "small text")
AGAIN, LAST = turn("user", "about"), turn("assistant", "chat")
CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"at": "hill"}}}
CALLS = turn("assistant", "", tool_calls=[CALL])
RESULT = turn("tool", "a tree", tool_call_id="call12345", name="look")
PROPERTIES = {"at": {"type": "string", "description": "where"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}]

CONVERSATIONS = {
    "one turn": [USER, ANSWER],
    "two turns": [USER, ANSWER, AGAIN, LAST],
    "tool call": [USER, CALLS, RESULT, LAST],
    "reasoning": [
        USER,
        {**ANSWER, "reasoning_content": "it is seven"},
        AGAIN,
        {**LAST, "reasoning_content": "templates"},
    ],
    "system": [turn("system", "Answer."), USER, ANSWER],
}
ALTERNATE, NO_TOOLS, NO_CALLS = "roles must alternate", "does not render the tools", "does not render the tool call"
NO_REASONING = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma-3",
    "lfm2",
    "llama-3",
    "llama-3.1",
    "llama-3.2",
    "phi-3",
    "phi-3.5",
)
REFUSED = {
    **{
        (name, "reasoning"): "does not render the reasoning_content"
        for name in (*NO_REASONING, "qwen2.5", "qwen3-2507")
    },
    ("lfm2", "tool call"): NO_CALLS,
    **{(name, "tool call"): ALTERNATE for name in ("cohere", "cohere2", "gemma", "gemma-3")},
    **{(name, "tool call"): NO_TOOLS for name in ("deepseek-v3", "llama-3", "phi-3", "phi-3.5")},
    ("gemma", "system"): "System role not supported",
    ("qwen3.5-nothink", "reasoning"): "closes the reasoning",
}
"""Cells of the table that are refused, and why."""


def encode(name: str, messages, tools=None, mask="assistant", **options):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    options = {"stop_ids": family.stop_ids(tokenizer), **options}
    encoder = ChatEncoder(tokenizer, options.pop("template", family.template), mask, **options)
    read, trained = read_messages(messages, "messages")
    (result,) = encoder.encode([Conversation(read, trained, tools)])
    if isinstance(result, RowError):
        raise result
    return tokenizer, split_documents(result), isinstance(result, Unrolled)


def trained_runs(tokenizer, documents):
    """Of each stretch of trained tokens what stands before it in its document, and its text."""
    for document in documents:
        flags = document.trained.tolist()
        starts = [i for i, flag in enumerate(flags) if flag and not (i and flags[i - 1])]
        for start in starts:
            stop = next((i for i in range(start, len(flags)) if not flags[i]), len(flags))
            yield document.ids[:start].tolist(), tokenizer.decode(document.ids[start:stop])


def expected_runs(name: str, messages, tools):
    """The library's prompt for each turn, and by hand what has to follow it."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    key = reasoning_key(family.template)
    named = [with_key(message, key) if key else message for message in messages]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            given = tokenizer.apply_chat_template(named[:i], tools=tools, add_generation_prompt=True)["input_ids"]
            thought = message.get("reasoning_content", "")
            yield given, family.call if "tool_calls" in message else family.answer(thought, message["content"])


@pytest.mark.parametrize("turns", ["auto", "per_turn"])
@pytest.mark.parametrize("said", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_stands_after_its_inference_prompt_or_the_row_is_refused(name, said, turns):
    messages, tools = CONVERSATIONS[said], TOOLS if said == "tool call" else None
    if (name, said) in REFUSED:
        with pytest.raises(RowError, match=REFUSED[name, said]):
            encode(name, messages, tools, turns=turns)
        return
    tokenizer, documents, _ = encode(name, messages, tools, turns=turns)
    assert list(trained_runs(tokenizer, documents)) == list(expected_runs(name, messages, tools))
    for document in documents:
        last = int(document.ids[document.trained.nonzero()[0][-1]])
        assert last == tokenizer.eos_token_id or last in FAMILIES[name].stop_ids(tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_unrolled_only_where_its_turns_need_it(name):
    rewriting = ("deepseek", "gpt-oss", "nemotron", "qwen3.", "qwen3")
    _, documents, unrolled = encode(name, CONVERSATIONS["two turns"])
    needs = name.startswith(rewriting) and name != "qwen3-2507"
    assert unrolled == needs and len(documents) == (2 if needs else 1)


def test_a_turn_that_changes_how_its_history_is_rendered_stands_after_its_own_prompt():
    """gpt-oss drops the analysis in front of a call once an answer follows, but the answer was said after it."""
    thinking = [USER, {**CALLS, "thinking": "it is seven"}, RESULT, {**LAST, "thinking": "templates"}]
    tokenizer, documents, unrolled = encode("gpt-oss", thinking)
    prompts = [tokenizer.apply_chat_template(thinking[:i], add_generation_prompt=True)["input_ids"] for i in (1, 3)]
    runs = list(trained_runs(tokenizer, documents))
    assert unrolled and [given for given, _ in runs] == prompts
    assert "it is seven" in tokenizer.decode(prompts[1])
    call = "<|channel|>analysis<|message|>it is seven<|end|><|start|>assistant" + FAMILIES["gpt-oss"].call
    assert [said for _, said in runs] == [call, FAMILIES["gpt-oss"].answer("templates", "chat")]


def outcome(name: str, said: str) -> str:
    """What `data.multi_turn=auto` makes of a conversation: one document, one for each turn, or the reason why none."""
    try:
        _, documents, unrolled = encode(name, CONVERSATIONS[said], TOOLS if said == "tool call" else None)
    except RowError as error:
        words = {ALTERNATE: "roles must alternate", NO_TOOLS: "no tools", NO_CALLS: "no calls"}
        words |= {"System role": "no system", "closes the reasoning": "thinking is off"}
        words |= {"the reasoning_content": "no reasoning"}
        return "error: " + next(short for part, short in words.items() if part in error.message)
    return f"{len(documents)} documents" if unrolled else "1 document"


def table() -> str:
    """The table of docs/guides/chat_templates.md; to write it anew, print this."""
    lines = ["| template | " + " | ".join(CONVERSATIONS) + " |", "|---" * (1 + len(CONVERSATIONS)) + "|"]
    lines += [f"| {name} | " + " | ".join(outcome(name, said) for said in CONVERSATIONS) + " |" for name in FAMILIES]
    return "\n".join(lines)


def test_the_table_in_the_docs_is_what_happens():
    assert table() in (Path(__file__).parents[4] / "docs" / "guides" / "chat_templates.md").read_text(encoding="utf-8")


# -- the stop token


def test_without_the_model_s_stop_tokens_an_open_turn_ends_with_eos():
    tokenizer, documents, unrolled = encode("glm-4.5", CONVERSATIONS["two turns"], stop_ids=())
    said = [text for _, text in trained_runs(tokenizer, documents)]
    assert unrolled and said == [f"\n<think></think>\n{a}<|endoftext|>" for a in ("small text", "chat")]
    with raises(RowError, "no_stop", values=("message 1",)) as caught:
        encode("glm-4.5", CONVERSATIONS["two turns"], stop_ids=(), turns="single")
    assert caught.value.fix == "data.multi_turn=per_turn, or data.multi_turn=auto"


def test_stop_tokens_come_from_the_generation_config_beside_the_weights(tmp_path):
    LlamaConfig(vocab_size=8, eos_token_id=2).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(tmp_path)
    assert stop_ids(ModelConfig(pretrained=str(tmp_path))) == [5, 7]
    assert stop_ids(ModelConfig(config={"model_type": "llama"})) == []


def test_a_stop_token_outside_of_the_tags_is_trained():
    outside = TAGGED.replace(" + '<|im_end|>' }}{% endgeneration %}{{", " }}{% endgeneration %}{{ '<|im_end|>' +")
    tokenizer = tiny_tokenizer(outside)
    (document,) = ChatEncoder(tokenizer, outside, "assistant").encode([Conversation([USER, ANSWER], [False, True])])
    assert trained_text(tokenizer, document) == "small text<|im_end|>"


# -- our own training templates

OURS = {
    "gpt-oss": "gpt-oss",
    "qwen3": "qwen3",
    "qwen3.5": "qwen3.5",
    "qwen3.5-nothink": "qwen3.5 without thinking",
    "qwen3.6": "qwen3.6",
    "deepseek-v3": "deepseek, thinking",
    "nemotron-3-nano": "nemotron-3",
    "nemotron-3-super": "nemotron-3",
    "nemotron-3-ultra": "nemotron-3-ultra",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_our_template_is_found_by_what_the_tokenizer_s_renders(name):
    family = FAMILIES[name]
    assert find_training_template(family.tokenizer(), family.template) == OURS.get(name)
    chosen = choose_template("auto", family.tokenizer(), "single")
    assert (chosen.name, chosen.own) == ((OURS[name], family.template) if name in OURS else (None, None))
    for choice, turns in (("auto", "auto"), ("tokenizer", "single"), (None, "per_turn")):
        assert choose_template(choice, family.tokenizer(), turns).text == family.template


@pytest.mark.parametrize("name", OURS)
def test_ours_renders_a_single_turn_text_by_text_and_token_by_token(name):
    family, ours = FAMILIES[name], training_template(OURS[name])
    tokenizer, key = family.tokenizer(), reasoning_key(family.template)
    compared = 0
    for messages, tools in PROBES.values():
        named = [with_key(message, key) if key else message for message in messages]
        try:
            own = tokenizer.apply_chat_template(named, tools=tools)["input_ids"]
        except TypeError:  # DeepSeek joins arguments as text
            assert name == "deepseek-v3"
            continue
        if tools and name == "gpt-oss":
            continue  # ours refuses tools, see its first lines
        assert tokenizer.apply_chat_template(named, tools=tools, chat_template=ours)["input_ids"] == own
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", OURS)
def test_whole_conversations_train_every_turn_as_if_it_were_the_last(name):
    family, ours = FAMILIES[name], training_template(OURS[name])
    options = {"turns": "single", "template": ours, "own_template": family.template}
    tokenizer, documents, unrolled = encode(name, CONVERSATIONS["two turns"], **options)
    assert not unrolled
    said = [text for _, text in trained_runs(tokenizer, documents)]
    alone = [encode(name, [USER, {**ANSWER, "content": m["content"]}], **options) for m in (ANSWER, LAST)]
    assert said == [next(trained_runs(*single[:2]))[1] for single in alone]
    stops = (tokenizer.eos_token, *family.stops)
    assert all(text.endswith(stops) for text in said)


def test_a_row_that_ours_renders_differently_is_refused():
    family = FAMILIES["qwen3"]
    own = family.template.replace("content ~ '<|im_end|>", "content | upper ~ '<|im_end|>")
    with raises(RowError, "other_template"):
        encode("qwen3", [USER, ANSWER], turns="single", template=training_template("qwen3"), own_template=own)


# -- from rows to reports


def two_turns(tmp_path, rows=20, **options):
    path = write_jsonl(tmp_path / "train.jsonl", [chat_row("hello", "a", "about", f"chat {i}") for i in range(rows)])
    return DataConfig(path=str(path), seq_len=96, cache_dir=str(tmp_path / "cache"), packing="none", **options)


def test_the_report_says_how_many_rows_were_unrolled_and_what_it_costs(tmp_path):
    tokenizer, config = FAMILIES["qwen3"].tokenizer(), two_turns(tmp_path)
    report = prepare_data(config, tokenizer, seed=0).report.train[0]
    first = len(tokenizer.apply_chat_template([USER, {**ANSWER, "content": "a"}])["input_ids"]) - 1
    assert report.num_documents == 40 and report.unrolled.repeated == 20 * first
    line = "  turns: 20 of 20 rows unrolled into 40 documents, because the chat template shows a turn another history"
    assert any(text.startswith(line) for text in report.lines())
    whole = prepare_data(replace(config, multi_turn="single"), tokenizer, seed=0).report.train[0]
    assert whole.num_documents == 20 and "our training template for qwen3" in whole.masked_by
    own = replace(config, multi_turn="single", chat_template="tokenizer")
    with raises(DataError, "bad_rows", values=("up to message 1",)):
        prepare_data(own, tokenizer, seed=0)


def test_documents_of_a_conversation_are_held_out_together(tmp_path):
    tokenizer = FAMILIES["qwen3"].tokenizer()
    prepared = prepare_data(two_turns(tmp_path, validation_size=5), tokenizer, seed=0)
    train, validation = (
        {line for row in range(len(data)) for _, line in data.documents(row)}
        for data in (prepared.train, prepared.validation)
    )
    assert len(validation) == 5 and len(train) == 15 and not train & validation
    assert len(prepared.train) == 30


def test_preferences_under_a_rewriting_template(tmp_path):
    """The response is one turn after any history; several trained turns cannot be two documents."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    history = [USER, {**ANSWER}, AGAIN]
    row = {"prompt": history, "chosen": [LAST], "rejected": [{**LAST, "content": "text"}]}
    path = write_jsonl(tmp_path / "pairs.jsonl", [row] * 4)
    config = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), truncation="drop", packing="best_fit")
    ids, mask, bounds = prepare_data(config, tokenizer, seed=0, preferences=True).train.tokens(0)
    prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)["input_ids"]
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert ids[a : a + len(prompt)].tolist() == prompt
        assert np.flatnonzero(mask[a:b])[0] == len(prompt) - 1
    both = {"chosen": [USER, ANSWER, AGAIN, LAST], "rejected": [USER, {**ANSWER, "content": "text"}, AGAIN, LAST]}
    write_jsonl(path, [both])
    with raises(DataError, "bad_rows", values=("chosen has 2 trained turns",)):
        prepare_data(config, tokenizer, seed=0, preferences=True)


def test_prompts_are_rendered_by_the_tokenizer_s_template_whatever_trains(tmp_path):
    tokenizer = FAMILIES["qwen3.5"].tokenizer()
    given = [tokenizer.apply_chat_template([USER, ANSWER, AGAIN], add_generation_prompt=True)["input_ids"]]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER, AGAIN, LAST]}])
    for choice in ("auto", "tokenizer"):
        config = DataConfig(
            path=str(path), chat_template=choice, multi_turn="single", cache_dir=str(tmp_path / "cache")
        )
        data = prepare_prompts(config, tokenizer, seed=0, max_tokens=64)
        assert [prompt.tokens for prompt in data.train.prompts] == given
    assert tokenizer.chat_template == FAMILIES["qwen3.5"].template


def test_unrolling_everything_is_refused():
    with raises(ConfigError, "unsupported_combination", keys=("multi_turn", "loss_mask")) as caught:
        DataConfig(path="x", multi_turn="per_turn", loss_mask="all")
    assert caught.value.fix == "data.multi_turn=single, or data.loss_mask=assistant"


@pytest.mark.parametrize("packing", ["none", "best_fit", "wrapped"])
@pytest.mark.parametrize("name", ["qwen3", "llama-3"])
def test_documents_of_a_conversation_are_stored_without_their_common_beginning(tmp_path, name, packing):
    """Against the documents encoded one by one; Llama-3's next document begins with all of the one before."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    words = ["hello", "a", "about", "text", "small", "chat", "hello", "seven"]
    path = write_jsonl(tmp_path / "train.jsonl", [chat_row(*words[: 2 * n]) for n in (1, 4, 2, 3)])
    settings = {
        "multi_turn": "per_turn",
        "packing": packing,
        "truncation": "split",
        "cache_dir": str(tmp_path / "cache"),
    }
    config = DataConfig(path=str(path), seq_len=4096, **settings)
    prepared = prepare_data(config, tokenizer, seed=0)
    expected = []
    for n in (1, 4, 2, 3):
        _, documents, _ = encode(name, chat_row(*words[: 2 * n])["messages"], turns="per_turn")
        expected += [(d.ids.tolist(), [*d.trained.tolist()[1:], 0]) for d in documents]
    found = []
    for row in range(len(prepared.train)):
        ids, mask, bounds = prepared.train.tokens(row)
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            found.append((ids[a:b].tolist(), mask[a:b].tolist()))
    assert sorted(found) == sorted(expected)
    report = prepared.report.train[0]
    stored = sum(path.stat().st_size // 2 for path in (tmp_path / "cache").glob("*/ids.bin")) - report.num_tokens
    assert report.num_tokens == sum(len(ids) for ids, _ in expected)
    once = report.num_tokens - report.unrolled.repeated
    assert stored == once if name == "llama-3" else once < stored < report.num_tokens


def test_special_tokens_in_the_text_stay_text_in_every_document(tmp_path):
    tokenizer = FAMILIES["qwen3"].tokenizer()
    path = write_jsonl(tmp_path / "train.jsonl", [chat_row("say <|im_end|>", "a", "about", "chat <|im_end|>")])
    config = DataConfig(path=str(path), packing="none", cache_dir=str(tmp_path / "cache"))
    data = prepare_data(config, tokenizer, seed=0).train
    ends = [data.tokens(row)[0].tolist().count(tokenizer.eos_token_id) for row in range(len(data))]
    assert ends == [2, 4]
