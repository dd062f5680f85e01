"""Multi-turn tool use: a calculator that a scripted model calls, and what of the conversation belongs in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.environments.calculator import Calculator, calculate
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool, check_environment_rows
from automodel_cli.rollout.types import Completion, SamplingParams
from tests.errors import raises

PARAMS = SamplingParams(max_new_tokens=40)
TOOL = Calculator(pattern="calc: (.+)", tool_call_reward=-0.1, error_reward=-0.5)


class Script:
    """An engine whose replies are written down, by conversation and turn: what is tested is the loop around it."""

    capabilities = Capabilities(logprobs=True, weight_updates=False)
    weight_version = 4

    def __init__(self, tokenizer, replies):
        self.tokenizer, self.replies, self.prompts, self.seeds = tokenizer, replies, [], []

    def generate(self, prompts, params, seeds=None):
        self.prompts.append([self.tokenizer.decode(p) for p in prompts])
        self.seeds.append(seeds)
        out = []
        for text, reason in self.replies.pop(0):
            tokens = self.tokenizer(text)["input_ids"] + ([self.tokenizer.eos_token_id] if reason == "stop" else [])
            out.append(Completion(tokens, [-0.5] * len(tokens), reason, self.weight_version))
        return out


@dataclass(frozen=True, kw_only=True)
class Broken(Environment):
    """Divides by zero when somebody says so."""

    def step(self, messages, row, state):
        return Turn(reward=1 / (messages[-1]["content"] != "boom"))


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


def play(engine, tokenizer, environment, episodes, params, *, seq_len, **options):
    with EnvironmentPool({"environment": environment}) as pool:
        EpisodeRunner(engine, tokenizer, pool, params, seq_len).run_lockstep(episodes, **options)


def episode_of(tokenizer, text, seed=None):
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return Episode(text, prompt, messages, {"answer": "?"}, seed)


def test_a_tool_is_called_and_its_words_are_not_trained(tokenizer):
    script = Script(tokenizer, [[("calc: 2 + 3", "stop"), ("7", "stop")], [("5", "stop")]])
    first, second = episodes = [episode_of(tokenizer, "2 + 3", 1), episode_of(tokenizer, "3 + 3", 2)]
    play(script, tokenizer, TOOL, episodes, PARAMS, seq_len=200)
    assert first.rewards == [-0.1, 0.0] and first.reward == -0.1 and second.reward == 0
    assert first.finish_reason == second.finish_reason == "stop" and first.weight_versions == [4, 4]
    assert script.prompts[1] == ["<|user|>2 + 3<|end|><|assistant|>calc: 2 + 3<|end|><|tool|>5<|end|><|assistant|>"]
    text = tokenizer.decode(first.tokens)
    assert text == "calc: 2 + 3<|end|><|tool|>5<|end|><|assistant|>5<|end|>"
    trained = tokenizer.decode([t for t, g in zip(first.tokens, first.generated, strict=True) if g])
    assert trained == "calc: 2 + 3<|end|>5<|end|>"
    assert [lp for lp, g in zip(first.logprobs, first.generated, strict=True) if not g] == [0.0] * 4
    assert [m["role"] for m in first.response_messages] == ["assistant", "tool", "assistant"]
    assert len(second.tokens) == len(second.generated) == 2 and all(second.generated)
    assert script.seeds[0][0] != script.seeds[1][0] and len(script.seeds[1]) == 1
    whole = tokenizer.apply_chat_template([*first.messages, *first.response_messages], return_dict=True)["input_ids"]
    assert first.prompt + first.tokens == whole  # what a reader of the conversation would train on


@pytest.mark.parametrize(
    ("reason", "max_turns", "seq_len", "end"),
    [("length", 4, 200, "length"), ("stop", 1, 200, "turns"), ("stop", 4, 61, "length")],
)
def test_an_episode_that_is_cut_off_ends_with_the_models_words(tokenizer, reason, max_turns, seq_len, end):
    script = Script(tokenizer, [[("calc: 2 + 3", reason)]])
    tool = Calculator(pattern="calc: (.+)", max_turns=max_turns)
    episode = episode_of(tokenizer, "2 + 3")
    play(script, tokenizer, tool, [episode], PARAMS, seq_len=seq_len)
    assert episode.finish_reason == end and all(episode.generated) and len(script.prompts) == 1


def test_a_message_begins_only_where_it_fits_whole(tokenizer):
    """Prompt, call and result are 6 + 12 + 4 tokens here, and the next message may have 40."""
    for seq_len, end in ((62, "stop"), (61, "length")):
        script = Script(tokenizer, [[("calc: 2 + 3", "stop")], [("5", "stop")]])
        episode = episode_of(tokenizer, "2+3")
        play(script, tokenizer, TOOL, [episode], PARAMS, seq_len=seq_len)
        assert episode.finish_reason == end


@pytest.mark.parametrize("on_error", ["zero", "fail", "skip"])
def test_an_environment_that_raises_ends_its_own_episode_and_says_whose(tokenizer, caplog, on_error):
    script = Script(tokenizer, [[("boom", "stop"), ("fine", "stop")]])
    first, second = episodes = [episode_of(tokenizer, "sample one"), episode_of(tokenizer, "sample two")]
    play(script, tokenizer, Broken(on_error=on_error), episodes, PARAMS, seq_len=200)
    assert first.finish_reason == "error" and first.error == "ZeroDivisionError: division by zero"
    assert second.finish_reason == "stop" and second.error is None and second.reward == 1.0
    (record,) = caplog.records
    assert f"sample one, turn 1: ZeroDivisionError: division by zero (on_error={on_error})" in record.getMessage()


def test_ranks_call_together_until_nobody_plays(tokenizer):
    """Another rank still plays for one more turn: this one calls too, without prompts."""
    script = Script(tokenizer, [[("5", "stop")], []])
    others = [True, False]
    play(
        script,
        tokenizer,
        TOOL,
        [episode_of(tokenizer, "2 + 3", 1)],
        PARAMS,
        seq_len=200,
        exchange=lambda ask: (ask(), others.pop(0)),
    )
    assert [len(prompts) for prompts in script.prompts] == [1, 0] and script.seeds[1] == []


def test_a_template_that_closes_a_turn_with_more_than_the_stop_token(tokenizer):
    other = ByteTokenizer().build()
    other.chat_template = tokenizer.chat_template.replace("endgeneration -%}", "endgeneration -%}{{- '\\n' -}}", 1)
    script = Script(other, [[("calc: 1 + 1", "stop")], [("2", "stop")]])
    episode = episode_of(other, "1 + 1")
    play(script, other, TOOL, [episode], PARAMS, seq_len=200)
    assert "calc: 1 + 1<|end|>\n<|tool|>2<|end|>" in other.decode(episode.tokens)


def test_a_template_that_drops_earlier_turns_is_refused(tokenizer):
    forgetful = ByteTokenizer().build()
    forgetful.chat_template = tokenizer.chat_template.replace("for message in messages", "for message in messages[-1:]")
    script = Script(forgetful, [[("calc: 1 + 1", "stop")]])
    with raises(DataError, "invalid_template", keys=("model.tokenizer",)):
        play(script, forgetful, TOOL, [episode_of(tokenizer, "1 + 1")], PARAMS, seq_len=200)


# The calculator


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3", "5"),
        ("1/3", "0.333333333333"),
        (" (1 + 2) * -3 ", "-9"),
        ("2**10", "1024"),
        ("7 // 2", "3"),
        ("-3 % 5", "2"),
        ("1.5 * 2", "3"),
        ("0.1 + 0.2", "0.3"),
    ],
)
def test_arithmetic_is_computed(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os')", "no arithmetic"),
        ("1 2", "no arithmetic"),
        ("", "no arithmetic"),
        ("...", "no arithmetic"),
        ("2(3)", "no arithmetic"),
        ("(" * 150, "no arithmetic"),
        ("1" * 201, "no arithmetic"),
        ("9**9**9**9", "too large"),
        ("2**4000/3", "too large"),
        ("2**0.5", "whole number"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
    ],
)
def test_anything_else_is_refused_at_once(text, said):
    with pytest.raises(ValueError, match=said):
        calculate(text)


def test_a_wrong_call_is_told_and_the_model_may_try_again():
    turn = TOOL.step([{"role": "assistant", "content": "calc: open('x')"}], {}, None)
    assert turn == Turn(({"role": "tool", "content": "error: no arithmetic"},), -0.5, done=False)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("out_of_range", {"max_turns": 0}),
        ("invalid_choice", {"on_error": "ignore"}),
        ("invalid_value", {"pattern": "("}),
        ("invalid_value", {"pattern": "calc"}),
        ("invalid_choice", {"role": "robot"}),
    ],
)
def test_wrong_options_are_refused(code, options):
    with raises(ConfigError, code, keys=tuple(options)):
        Calculator(**options)


def test_every_environment_is_named_by_a_row():
    rows = [("a.jsonl:1", {"environment": "maths"})]
    check_environment_rows({"maths": TOOL}, "environment", rows)
    with raises(ConfigError, "no_effect", keys=("rollout.environments.code",), fix="~rollout.environments.code"):
        check_environment_rows({"maths": TOOL, "code": TOOL}, "environment", rows)
