"""Nothing that a row brings vanishes: what each family's template drops is refused by name, what it escapes is not."""

from __future__ import annotations

import json

import pytest

from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.formats.messages import read_messages
from automodel_cli.data.row_errors import RowError
from tests.unit.data import family_templates as families
from tests.unit.data.helpers import tiny_tokenizer, trained_text, turn

PATH = "C:\\new \"folder\"\n\tünïcode 日本 <b> & 'quoted'"


def call(name="add", arguments=None, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments or {"path": PATH}}, **more}


def with_call(*calls, content=""):
    return [
        turn("user", "add the path, 4"),
        turn("assistant", content, tool_calls=list(calls)),
        turn("tool", PATH),
        turn("assistant", "a small text"),
    ]


def encode(template, messages, mask="last_turn", tools=None):
    read, trained = read_messages(messages, "messages")
    tokenizer = tiny_tokenizer(template)
    (result,) = ChatEncoder(tokenizer, template, mask).encode([Conversation(read, trained, tools)])
    return tokenizer, result


def left_out(result) -> str:
    """What the refusal names, without its beginning."""
    assert isinstance(result, RowError), "not refused"
    assert result.code == "dropped_by_template" and result.fix
    return result.message.removeprefix("the chat template does not render ")


TOOL_CALLS = {
    "chatml": (families.CHATML, "the tool call 'add' of message 1 ('add')"),
    "llama3": (families.LLAMA3, "the tool call 'add' of message 1 ('add')"),
    "qwen3": (families.QWEN3, None),
    "coder": (families.CODER, None),
    "hermes": (families.HERMES, None),
    "mistral": (families.MISTRAL, None),
    "deepseek": (families.DEEPSEEK, None),
    "harmony": (families.HARMONY, None),
}


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_a_call_is_rendered_or_refused_by_name(name):
    """The name of the call and its only argument stand in the question as well: finding them is no proof."""
    template, refused = TOOL_CALLS[name]
    for arguments in ({"path": PATH}, {"path": "4"}, {"add": [{"path": "4"}], "n": 4, "on": True, "none": None}):
        _, result = encode(template, with_call(call(arguments=arguments)))
        assert (left_out(result) if refused else isinstance(result, RowError)) == (refused or False), arguments


@pytest.mark.parametrize(
    ("template", "messages", "refused"),
    [
        (families.HARMONY, with_call(call(), call("multiply")), "the tool call 'multiply' of message 1 ('multiply')"),
        (families.MISTRAL, with_call(call(), content="let me see"), "message 1 (role 'assistant', 'let me see')"),
        (families.QWEN3, with_call(call(), content="let me see"), None),
        (families.MISTRAL, [turn("system", "be brief"), *with_call(call())], None),
    ],
)
def test_parts_of_a_message(template, messages, refused):
    if template is families.MISTRAL and messages[0]["role"] == "system":
        template = template.replace("{% else %}", "{% elif m.role == 'system' %}{% else %}")
        refused = "message 0 (role 'system', 'be brief')"
    _, result = encode(template, messages)
    assert (left_out(result) if refused else isinstance(result, RowError)) == (refused or False)


REASONING = {
    "chatml": (families.CHATML, True, False),
    "llama3": (families.LLAMA3, True, False),
    "qwen3": (families.QWEN3, False, False),
    "deepseek": (families.DEEPSEEK, True, True),
}


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_rendered_or_refused(name):
    template, key_refused, thought_refused = REASONING[name]
    said = [turn("user", "hello"), turn("assistant", "small", reasoning_content="\nhm, hello \n")]
    _, result = encode(template, said)
    assert isinstance(result, RowError) == key_refused
    if key_refused:
        assert left_out(result) == "the reasoning_content of message 1 ('hm, hello')"
        assert result.fix.startswith("data.ignored_columns=[reasoning_content]")
    _, result = encode(template, [said[0], turn("assistant", "<think>\nhello\n</think>\n\nsmall")])
    assert isinstance(result, RowError) == thought_refused
    if thought_refused:
        assert left_out(result) == "the thought of message 1 ('hello')"


def test_reasoning_of_a_turn_that_is_not_trained_is_history():
    messages = [
        turn("user", "hello"),
        turn("assistant", "<think>so</think>small", train=False),
        turn("user", "about"),
        turn("assistant", "<think>hm</think>text"),
    ]
    tokenizer, result = encode(families.QWEN3, messages, "assistant")
    assert trained_text(tokenizer, result) == "<think>\nhm\n</think>\n\ntext<|im_end|>"
    assert "so" not in tokenizer.decode(result.ids)


def test_a_template_that_looks_into_the_text_is_found_out_on_its_row():
    """The shape of both conversations is the same, and the first one is fine."""
    template = families.CHATML.replace("m['content']", "m['content'].split('###')[0]")
    tokenizer = tiny_tokenizer(template)
    chats = [
        Conversation(*read_messages([turn("user", text), turn("assistant", "yes")], "messages"))
        for text in ("what is this", "what is this ### a text of its own")
    ]
    good, bad = ChatEncoder(tokenizer, template, "assistant").encode(chats)
    assert not isinstance(good, RowError)
    assert left_out(bad) == "message 0 (role 'user', 'what is this ### a text of its own')"


def test_a_template_that_rewrites_without_dropping_is_accepted():
    shouts = families.CHATML.replace("m['content']", "m['content'] | upper | replace(' ', '_')")
    _, result = encode(shouts, [turn("user", "a small text"), turn("assistant", "the answer is seven")])
    assert not isinstance(result, RowError)


def test_tools_must_be_rendered_with_their_parameters():
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
    messages = [turn("user", "add a and b: adds numbers"), turn("assistant", "yes")]
    _, result = encode(families.CHATML, messages, tools=[tool])
    assert result.code == "tools_ignored"
    _, result = encode(families.QWEN3, messages, tools=[tool])
    assert not isinstance(result, RowError)
    names_only = families.QWEN3.replace("t | tojson", "t.function.name + t.function.description")
    _, result = encode(names_only, messages, tools=[tool])
    assert result.code == "tools_ignored" and "'a'" in result.message


def test_names_of_speakers_and_keys_of_the_template():
    named = [turn("user", "hello", name="Ada"), turn("assistant", "small")]
    _, result = encode(families.CHATML, named)
    assert left_out(result) == "'name' of message 0 ('Ada')" and "ignored_columns=[name]" in result.fix
    shows = families.CHATML.replace("m['content']", "(m['name'] or '') + m['content']")
    _, result = encode(shows, named)
    assert not isinstance(result, RowError)


# -- arguments and ids


@pytest.mark.parametrize(
    "template", [families.DEEPSEEK, families.CHATML + "{{ messages[1].tool_calls[0].function.arguments }}"]
)
@pytest.mark.parametrize("written", [dict, json.dumps])
def test_arguments_are_json_text_where_the_template_joins_text(template, written):
    arguments = {"city": "Zürich", "days": 2, "now": True}
    messages = [turn("user", "weather"), turn("assistant", "text", tool_calls=[call("weather", written(arguments))])]
    if template is not families.DEEPSEEK:
        template = template.replace(
            "m['content']", "m['content'] + (m.tool_calls[0].function.name if m.tool_calls else '')"
        )
    tokenizer, result = encode(template, messages, "all")
    text = tokenizer.decode(result.ids)
    assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == arguments


def test_missing_call_ids_are_filled_so_that_a_template_that_needs_them_renders():
    tokenizer, result = encode(families.MISTRAL, with_call(call()))
    text = tokenizer.decode(result.ids)
    asked = text.split('"id": "')[1][:9]
    assert asked.isalnum() and f'"call_id": "{asked}"' in text
    (first, _), (again, _) = (read_messages(with_call(call(), call("other")), "m") for _ in range(2))
    ids = [made["id"] for made in first[1]["tool_calls"]]
    assert len(set(ids)) == 2 and first == again and first[2]["tool_call_id"] == ids[0]
    theirs, _ = read_messages(
        [*with_call(call())[:2], turn("tool", "5", tool_call_id="xyz"), turn("assistant", "y")], "m"
    )
    assert theirs[1]["tool_calls"][0]["id"] == "xyz", "the answer names the call that has no name"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([turn("assistant", "x", reasoning_content=1)], "m[0].reasoning_content is 1, not text"),
        (with_call(call(id=123)), "m[1].tool_calls[0].id is 123, not text"),
        (
            with_call({**call(), "type": "code_interpreter"}),
            "m[1].tool_calls[0].type is 'code_interpreter'",
        ),
        (
            with_call({"type": "function", "function": {"name": "add"}}),
            "m[1].tool_calls[0].function ('add') has no arguments",
        ),
        (
            with_call(call(id="c1")),
            "m[2] is a tool result without tool_call_id; the preceding calls have the ids 'c1'",
        ),
        (with_call(call(arguments="[1]")), "m[1].tool_calls[0].function.arguments is list, not an object"),
        (with_call(call(arguments="{1")), "m[1].tool_calls[0].function.arguments is not JSON: Expecting property"),
        (with_call(call(name=7)), "m[1].tool_calls[0].function.name is 7"),
        (with_call({**call(), "weight": 0}), "m[1].tool_calls[0] has the key 'weight'"),
        ([turn("assistant", "x", tool_calls={"name": "f"})], "m[0].tool_calls is dict, not a list of calls"),
        ([turn("user", "x", tool_calls=[call()])], "m[0] has tool_calls"),
    ],
)
def test_malformed_messages_are_named(messages, message):
    with pytest.raises(RowError) as caught:
        read_messages(messages, "m")
    assert caught.value.message.startswith(message)
