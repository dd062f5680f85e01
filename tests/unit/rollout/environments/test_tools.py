"""Tools that the model calls by name: what it is shown of them, what it is told, and what is not its fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.prompts import prepare_prompts
from automodel_cli.models.tokenizer import CHAT_TEMPLATE, ByteTokenizer
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.environments.base import Turn
from automodel_cli.rollout.environments.functions import FunctionTools
from automodel_cli.rollout.environments.python_tool import PythonTool
from automodel_cli.rollout.rewards.sandbox.host import _CUT_OFF, isolation, statement
from tests.errors import raises


def area(width: float, height: float = 1.0) -> float:
    """The area of a rectangle.

    Args:
        width: in metres
        height: in metres
    """
    if width < 0:
        raise ValueError("no such rectangle")
    return width * height


async def lookup(word: str) -> str:
    """Looks a word up.

    Args:
        word: what to look up
    """
    await asyncio.sleep(0)
    if word == "away":
        raise ConnectionError("the dictionary is away")
    return f"{word} means nothing"


def undescribed(width: float) -> float:
    return width


REWARDS: Any = {"tool_call_reward": 0.5, "error_reward": -0.25}
TOOLS = FunctionTools(functions={"area": area, "look": lookup}, max_result_chars=20, **REWARDS)


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def turn(environment: Any, text: str) -> Turn:
    return asyncio.run(environment.step([{"role": "assistant", "content": text}], {}, None))


def test_a_function_is_described_as_openai_does() -> None:
    """Written by hand after the reference of OpenAI's API."""
    number = {"type": "number", "description": "in metres"}
    assert TOOLS.tools[0] == {
        "type": "function",
        "function": {
            "name": "area",
            "description": "The area of a rectangle.",
            "parameters": {
                "type": "object",
                "properties": {"width": number, "height": number},
                "required": ["width"],
            },
        },
    }
    assert TOOLS.tools[1]["function"]["name"] == "look"
    assert FunctionTools(functions={"area": area}, show_tools=False).tools == ()


@pytest.mark.parametrize(
    ("text", "said", "reward"),
    [
        (call("area", {"width": 2, "height": 3}), ["6"], 0.5),
        (call("area", '{"width": 2}'), ["2.0"], 0.5),
        (call("look", {"word": "a"}), ["a means nothing"], 0.5),
        (call("look", {"word": "abcdefghij"}), ["abcdefghij means not ... (4 more characters)"], 0.5),
        (
            f"first {call('area', {'width': 1})} then {call('area', {'width': -1})}",
            ["1.0", "error: ValueError: n"],
            0.25,
        ),
        (call("area", {"depth": 2}), ["error: area: missing"], -0.25),
        (call("volume", {}), ["error: there is no t"], -0.25),
        ("<tool_call>area(2)</tool_call>", ["error: a call is"], -0.25),
        (call("area", [2]), ["error: a call is"], -0.25),
        ("<tool_call>{}</tool_call>", ["error: a call is"], -0.25),
    ],
)
def test_calls_are_made_in_order_and_mistakes_are_told(text: str, said: list[str], reward: float) -> None:
    found = turn(TOOLS, text)
    assert not found.done and found.reward == reward
    assert [message["role"] for message in found.observations] == ["tool"] * len(said)
    for message, begin in zip(found.observations, said, strict=True):
        assert message["content"].startswith(begin)


def test_a_message_without_a_call_is_the_answer() -> None:
    assert turn(TOOLS, "the area is 6") == Turn()


def test_a_tool_that_is_away_is_not_the_models_fault() -> None:
    with pytest.raises(ConnectionError):
        turn(TOOLS, call("look", {"word": "away"}))


def test_a_message_makes_only_so_many_calls() -> None:
    tools = FunctionTools(functions={"area": area}, max_calls=1)
    said = [message["content"] for message in turn(tools, 2 * call("area", {"width": 1})).observations]
    assert said == ["1.0", "error: a message may call 1 tools"]


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({}, "empty_value", "functions"),
        ({"functions": {"f": undescribed}}, "invalid_value", "functions.f"),
        ({"functions": {"f": area}, "pattern": "call"}, "invalid_value", "pattern"),
        ({"functions": {"f": area}, "role": "robot"}, "invalid_choice", "role"),
        ({"functions": {"f": area}, "max_calls": 0}, "out_of_range", "max_calls"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(options: dict[str, Any], code: str, key: str) -> None:
    with raises(ConfigError, code, keys=(key,)):
        FunctionTools(**options)


# What the model is shown


class Rows:
    def __init__(self, *rows: dict[str, Any]) -> None:
        self._rows = rows

    def rows(self, split: str) -> Any:
        return iter(self._rows if split == "train" else ())

    def cache_key(self) -> str:
        return "rows"


def asked(*rows: dict[str, Any], template: str, environment: Any = TOOLS) -> list[str]:
    tokenizer = ByteTokenizer().build()
    tokenizer.chat_template = template
    rollout = RolloutConfig(environments={"tools": environment}, environment_column="kind")
    data: Any = DataConfig(generator=Rows(*rows))
    found = prepare_prompts(data, tokenizer, seed=0, max_tokens=9999, tools_of=rollout.tools_of)
    assert all((prompt.tools is not None) == (prompt.row["kind"] == "tools") for prompt in found.train.prompts)
    return [tokenizer.decode(prompt.tokens) for prompt in found.train.prompts]


SHOWS = "{%- if tools -%}{{- '<|system|>' ~ (tools | tojson) ~ '<|end|>' -}}{%- endif -%}" + CHAT_TEMPLATE
ASK = [{"role": "user", "content": "2 x 3?"}, {"role": "assistant", "content": "6"}]


def test_the_prompt_shows_the_tools_of_its_own_environment() -> None:
    first, second = asked({"messages": ASK, "kind": "tools"}, {"messages": ASK, "kind": "none"}, template=SHOWS)
    head, _, rest = first.removeprefix("<|system|>").partition("<|end|>")
    assert json.loads(head) == list(TOOLS.tools)
    assert rest == second == "<|user|>2 x 3?<|end|><|assistant|>"


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    with raises(DataError, "bad_rows", values=("rollout.environment.show_tools=false",)):
        asked({"messages": ASK, "kind": "tools"}, template=CHAT_TEMPLATE)
    hidden = FunctionTools(functions={"area": area}, show_tools=False)
    tokenizer, data = ByteTokenizer().build(), DataConfig(generator=Rows({"messages": ASK, "kind": "tools"}))  # type: ignore[arg-type]
    rollout = RolloutConfig(environment=hidden)
    assert len(prepare_prompts(data, tokenizer, seed=0, max_tokens=99, tools_of=rollout.tools_of).train) == 1


def test_two_sources_of_tools_are_refused() -> None:
    own = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    with raises(DataError, "bad_rows", values=("tools", "data.column_mapping.tools=''")):
        asked({"messages": ASK, "kind": "tools", "tools": own}, template=SHOWS)


# Python

needs_isolation = pytest.mark.skipif(not set(_CUT_OFF) <= isolation(), reason=f"the kernel enforces: {statement()}")


@needs_isolation
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(sum(range(101)))", "5050\n"),
        ("x = 1", "(nothing was printed)"),
        ("print('so far')\n1/0", "error: so far\nZeroDivisionError: division by zero"),
        ("while True: pass", "error: the program was ended after 0.5 s"),
        ("x = bytearray(10**9)", "error: MemoryError"),
        ("import socket; socket.socket()", "error: PermissionError"),
        ("import os; os.fork()", "error: "),
        ("open('/etc/passwd').read()", "error: "),
        ("print('a' * 10**6)", "a" * 4000 + " ... ("),
    ],
)
def test_code_of_the_model_is_run_and_cut_off_from_the_machine(code: str, said: str) -> None:
    tool = PythonTool(seconds=0.5 if "while" in code else 10, memory_mib=128)  # a busy machine starts Python slowly
    tool.check()
    (message,) = turn(tool, call("python", {"code": code})).observations
    assert message["content"].startswith(said)


@needs_isolation
def test_blocks_of_code_are_calls_and_keep_nothing() -> None:
    tool = PythonTool(run_code_blocks=True)
    text = "Let us see.\n```python\nx = 6\nprint(x)\n```\nand\n```python\nprint(x)\n```"
    said = [message["content"] for message in turn(tool, text).observations]
    assert said == ["6\n", "error: NameError: name 'x' is not defined"] and tool.tools == ()
    assert turn(tool, call("python", {"code": "1"})).done


def test_python_takes_code_alone() -> None:
    for arguments in ({}, {"code": 1}, {"code": "1", "stdin": ""}):
        (message,) = turn(PythonTool(), call("python", arguments)).observations
        assert message["content"] == "error: python takes code, a text, and nothing else"
