"""Environments of the real `verifiers` package: tools, rubric, and what they may not do to a conversation."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.rollout.environments.verifiers import VerifiersEnvironment, VerifiersTasks
from automodel_cli.rollout.types import Completion, SamplingParams
from tests.errors import raises

MODULE = """
import verifiers as vf
from datasets import Dataset

async def half(number: int) -> int:
    '''Half of a number.

    Args:
        number: an even number
    '''
    if number % 2:
        raise ValueError("odd")
    return number // 2

def rows():
    return Dataset.from_list([{"question": f"What is half of {n}?", "answer": str(n // 2)} for n in (8, 6, 4)])

async def right(completion, answer):
    return float(completion[-1].content == answer)

async def short(completion):
    return float(len(completion) <= 2)

class Rewriting(vf.ToolEnv):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages if not state["trajectory"] else [vf.UserMessage(content="What?"), *messages[1:]]

def load_environment(kind="tools"):
    if kind == "gym":
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv
        return ReasoningGymEnv(gym="basic_arithmetic", num_train_examples=4, num_eval_examples=2, seed=1)
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.25])
    made = {"tools": vf.ToolEnv, "rewriting": Rewriting}[kind]
    return made(tools=[half], dataset=rows(), eval_dataset=rows(), rubric=rubric, max_turns=4)
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("this release of verifiers has no load_environment")
    folder = tmp_path_factory.mktemp("halves")
    (folder / "halves.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


class Script:
    """An engine whose messages are written down, turn by turn; the loop and the environment are real."""

    capabilities = Capabilities(logprobs=True, weight_updates=False)
    weight_version = 0

    def __init__(self, tokenizer: Any, *turns: str, reason: Any = "stop") -> None:
        self.tokenizer, self.turns, self.reason = tokenizer, list(turns), reason

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        tokens = [*self.tokenizer(self.turns.pop(0))["input_ids"], self.tokenizer.eos_token_id]
        return [Completion(tokens, [-0.5] * len(tokens), self.reason, 0) for _ in prompts]


def half_of(number: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'half', 'arguments': {'number': number}})}</tool_call>"


def played(*turns: str, kind: str = "tools", reason: str = "stop", seq_len: int = 2000, **options: Any) -> Episode:
    tokenizer = ByteTokenizer().build()
    row = next(VerifiersTasks(environment="halves", arguments={"kind": kind}).rows("train"))
    messages = row["messages"]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    episode = Episode("sample 0", prompt, messages, row, 1)
    node = VerifiersEnvironment(environment="halves", arguments={"kind": kind}, **options)
    node.check()
    with EnvironmentPool({"environment": node}) as pool:
        engine = Script(tokenizer, *turns, reason=reason)
        EpisodeRunner(engine, tokenizer, pool, SamplingParams(max_new_tokens=100), seq_len).run_lockstep([episode])
    return episode


def test_rows_and_tools_are_theirs() -> None:
    task = VerifiersTasks(environment="halves", num_train=2, num_validation=1)
    rows = list(task.rows("train"))
    assert [row["messages"][-1]["content"] for row in rows] == ["What is half of 8?", "What is half of 6?"]
    assert rows[0]["answer"] == "4" and rows[0]["kind"] == "halves" and len(list(task.rows("validation"))) == 1
    (tool,) = VerifiersEnvironment(environment="halves").tools
    assert tool["function"]["name"] == "half" and tool["function"]["parameters"]["required"] == ["number"]


def test_a_conversation_with_tools_gets_the_rubrics_reward() -> None:
    episode = played(half_of(8), "4")
    assert [m["role"] for m in episode.response_messages] == ["assistant", "tool", "assistant"]
    assert (
        episode.response_messages[1]["content"] == "4"
        and episode.rewards == [0.0, 1.0]
        and episode.finish_reason == "stop"
    )
    assert played("4").rewards == [1.25] and played("5").rewards == [0.25]
    wrong = played(half_of(7), half_of(8), "4")
    assert wrong.response_messages[1]["content"] == "odd" and wrong.reward == 1.0


@pytest.mark.parametrize(
    ("turns", "options", "end"),
    [
        ((half_of(8),), {"max_turns": 1}, "turns"),
        ((half_of(8),), {"reason": "length"}, "length"),
        ((half_of(8),), {"seq_len": 120}, "length"),
    ],
)
def test_a_conversation_that_has_no_room_left_is_judged_as_it_is(turns: Any, options: Any, end: str) -> None:
    episode = played(*turns, **options)
    assert episode.finish_reason == end and episode.error is None
    assert episode.reward in (0.0, 0.25)  # nothing right; one message and perhaps the tool's


def test_an_environment_that_rewrites_the_conversation_is_refused_with_its_turn() -> None:
    with raises(DataError, "environment_failed", values=("sample 0, turn 1: message 1",)):
        played(half_of(8), "4", kind="rewriting")


def test_one_that_comes_with_the_package_judges_with_its_own_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    row = next(VerifiersTasks(environment="halves", arguments={"kind": "gym"}).rows("train"))
    question = row["messages"][-1]["content"]
    assert row["messages"][0]["role"] == "system" and any(sign in question for sign in "+-*/")
    right = _value_of(question)
    assert played(f"<answer>{right}</answer>", kind="gym").rewards == [1.0]
    assert played("<answer>none</answer>", kind="gym").reward < 0.5


def _value_of(question: str) -> str:
    import re

    from automodel_cli.rollout.environments.calculator import calculate

    return calculate(max(re.findall(r"[-+*/0-9(). ]+", question), key=len).strip(" ."))


def test_the_runs_own_signal_handlers_stay() -> None:
    before = signal.getsignal(signal.SIGTERM)
    VerifiersEnvironment(environment="halves", arguments={"kind": "rewriting"}).check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_cannot_be_an_environment_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "not_supported", keys=("retries",), values=(1,), fix="retries=0"):
        VerifiersEnvironment(environment="halves", retries=1)
    with raises(ConfigError, "environment_failed", keys=("environment",), values=("no_such_module",)):
        VerifiersEnvironment(environment="no_such_module").check()
    with raises(
        ConfigError, "invalid_value", keys=("environment",), values=("owner/some-name",), fix="environment=some_name"
    ):
        VerifiersEnvironment(environment="owner/some-name").check()
