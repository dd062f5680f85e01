"""Multi-turn tool use: a calculator that a scripted model calls, and what of the conversation belongs in the loss."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engine import Capabilities, Completion, SamplingParams
from automodel_cli.rollout.environment import Turn, play

PARAMS = SamplingParams(max_new_tokens=40)


class Calculator:
    """`calc: 2 + 3` gets `5` back from the tool; anything else is the answer, worth 1 if right. A call costs 0.1."""

    def step(self, conversations, metadata):
        return [
            self._turn(messages[-1]["content"], answer)
            for messages, answer in zip(conversations, metadata, strict=True)
        ]

    def _turn(self, said, answer):
        call = re.fullmatch(r"calc: (\d+) \+ (\d+)", said)
        if call is None:
            return Turn(reward=float(said == answer), metadata=answer)
        result = {"role": "tool", "content": str(int(call[1]) + int(call[2]))}
        return Turn((result,), reward=-0.1, done=False, metadata=answer)


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


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


def ask(text):
    return [{"role": "user", "content": text}]


def test_a_tool_is_called_and_its_words_are_not_trained(tokenizer):
    script = Script(tokenizer, [[("calc: 2 + 3", "stop"), ("7", "stop")], [("5", "stop")]])
    episodes = play(script, tokenizer, Calculator(), [ask("2 + 3"), ask("3 + 3")], ["5", "6"], PARAMS, seeds=[1, 2])
    first, second = episodes
    assert [e.reward for e in episodes] == [pytest.approx(0.9), 0.0]
    assert first.rewards == [-0.1, 1.0] and first.finish_reason == "stop" and first.weight_versions == [4, 4]
    assert script.prompts[1] == ["<|user|>2 + 3<|end|><|assistant|>calc: 2 + 3<|end|><|tool|>5<|end|><|assistant|>"]
    text = tokenizer.decode(first.tokens)
    assert text == "calc: 2 + 3<|end|><|tool|>5<|end|><|assistant|>5<|end|>"
    trained = tokenizer.decode([t for t, g in zip(first.tokens, first.generated, strict=True) if g])
    assert trained == "calc: 2 + 3<|end|>5<|end|>"
    assert [lp for lp, g in zip(first.logprobs, first.generated, strict=True) if not g] == [0.0] * 4
    assert [m["role"] for m in first.messages] == ["user", "assistant", "tool", "assistant"]
    assert len(second.tokens) == len(second.generated) == 2 and all(second.generated)
    assert script.seeds[0] != script.seeds[1] and len(script.seeds[1]) == 1
    whole = tokenizer.apply_chat_template(first.messages, return_dict=True)["input_ids"]
    assert first.prompt + first.tokens == whole  # what a reader of the conversation would train on


@pytest.mark.parametrize(
    ("replies", "options"),
    [
        ([[("calc: 2 + 3", "length")]], {}),
        ([[("calc: 2 + 3", "stop")]], {"max_turns": 1}),
        ([[("calc: 2 + 3", "stop")]], {"max_tokens": 14}),
    ],
)
def test_an_episode_that_is_cut_off_ends_with_the_models_words(tokenizer, replies, options):
    script = Script(tokenizer, replies)
    (episode,) = play(script, tokenizer, Calculator(), [ask("2 + 3")], ["5"], PARAMS, **options)
    assert episode.finish_reason == "length" and all(episode.generated) and len(script.prompts) == 1


def test_a_template_that_closes_a_turn_with_more_than_the_stop_token(tokenizer):
    other = ByteTokenizer().build()
    other.chat_template = tokenizer.chat_template.replace("endgeneration -%}", "endgeneration -%}{{- '\\n' -}}", 1)
    script = Script(other, [[("calc: 1 + 1", "stop")], [("2", "stop")]])
    (episode,) = play(script, other, Calculator(), [ask("1 + 1")], ["2"], PARAMS)
    assert "calc: 1 + 1<|end|>\n<|tool|>2<|end|>" in other.decode(episode.tokens)


def test_a_template_that_drops_earlier_turns_is_refused(tokenizer):
    forgetful = ByteTokenizer().build()
    forgetful.chat_template = tokenizer.chat_template.replace("for message in messages", "for message in messages[-1:]")
    script = Script(forgetful, [[("calc: 1 + 1", "stop")]])
    with pytest.raises(DataError, match="cannot play several turns"):
        play(script, forgetful, Calculator(), [ask("1 + 1")], ["2"], replace(PARAMS))
