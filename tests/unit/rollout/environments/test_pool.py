"""Environments that are slow, fail or hang: many at once, within limits, and with the same result in any order."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from automodel_cli.config.errors import ConfigError, DataError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool, check_environment_rows
from automodel_cli.rollout.types import Completion, SamplingParams
from tests.errors import raises

PARAMS = SamplingParams(max_new_tokens=12)
LETTERS = "abcdefghijklmnop"


class Drawn:
    """An engine that draws letters from the seed and the prompt alone, as a seeded engine does."""

    capabilities = Capabilities(logprobs=True, weight_updates=False)
    weight_version = 0

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        assert seeds is not None
        out = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            digest = hashlib.sha256(f"{seed} {list(prompt)}".encode()).digest()
            text = "".join(LETTERS[byte % 16] for byte in digest[: 3 + digest[0] % 4])
            tokens = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
            out.append(Completion(tokens, [-float(b) / 256 for b in digest[: len(tokens)]], "stop", 0))
        return out


@dataclass(frozen=True, kw_only=True)
class Echo(Environment):
    """Repeats a word until it begins with a letter before `end`; takes as long as `delays` say, in turn."""

    end: str = "e"
    delays: tuple[float, ...] = (0.0,)

    log: ClassVar[list[str]] = []

    async def step(self, messages: Any, row: Any, state: Any) -> Turn:
        word, number = str(messages[-1]["content"]), len(self.log)
        self.log.append(word)
        await asyncio.sleep(self.delays[number % len(self.delays)])
        count = (state or 0) + 1
        return Turn(({"role": "tool", "content": word},), reward=count, done=word[0] < self.end, state=count)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return ByteTokenizer().build()


def new(tokenizer: Any, count: int, **row: Any) -> list[Episode]:
    messages = [{"role": "user", "content": "go"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [Episode(f"sample {i}", prompt, messages, row, 100 + i) for i in range(count)]


def played(tokenizer: Any, environment: Any, episodes: list[Episode], *, run_async: int = 0) -> list[Episode]:
    with EnvironmentPool({"environment": environment}) as pool:
        player = EpisodeRunner(Drawn(tokenizer), tokenizer, pool, PARAMS, 400)
        player.run_async(episodes, run_async) if run_async else player.run_lockstep(episodes)
    return episodes


def content(episodes: list[Episode]) -> list[Any]:
    return [
        (e.tokens, e.logprobs, e.generated, e.response_messages, e.rewards, e.finish_reason, e.error) for e in episodes
    ]


def test_what_is_drawn_does_not_depend_on_which_conversation_is_ready_first(tokenizer: Any) -> None:
    """Against one conversation after another, each alone: all together, and each at its own pace, with delays that
    change the order of every turn."""
    want = [content(played(tokenizer, Echo(max_turns=5), [e]))[0] for e in new(tokenizer, 9)]
    assert {len(rewards) for *_, rewards, _, _ in want} >= {1, 2, 4}
    for delays in ((0.0, 0.02, 0.005, 0.03, 0.01), (0.03, 0.0, 0.01)):
        slow = Echo(max_turns=5, delays=delays)
        assert content(played(tokenizer, slow, new(tokenizer, 9))) == want
        assert content(played(tokenizer, slow, new(tokenizer, 9), run_async=4)) == want


def test_conversations_that_go_at_their_own_pace_do_not_wait_for_the_slowest(tokenizer: Any) -> None:
    """One of eight sleeps; the others have ended all their turns when it wakes up."""
    ended: list[str] = []

    @dataclass(frozen=True, kw_only=True)
    class Slow(Environment):
        async def step(self, messages: Any, row: Any, state: Any) -> Turn:
            count = (state or 0) + 1
            await asyncio.sleep(0.3 * row.get("slow", 0) * (count == 1))
            if count == 3:
                ended.append("slow" if "slow" in row else "fast")
            return Turn(({"role": "tool", "content": "on"},), done=count == 3, state=count)

    episodes = [*new(tokenizer, 1, slow=True), *new(tokenizer, 7)]
    played(tokenizer, Slow(), episodes, run_async=8)
    assert ended == ["fast"] * 7 + ["slow"]


@dataclass(frozen=True, kw_only=True)
class Counting(Environment):
    """Sleeps in its thread, and keeps the largest number of steps that ran at once."""

    running: ClassVar[list[int]] = [0, 0]
    lock: ClassVar[threading.Lock] = threading.Lock()

    def step(self, messages: Any, row: Any, state: Any) -> Turn:
        with self.lock:
            self.running[0] += 1
            self.running[1] = max(self.running)
        time.sleep(0.02)
        with self.lock:
            self.running[0] -= 1
        return Turn()


@pytest.mark.parametrize("limit", [1, 3])
def test_at_most_so_many_steps_run_at_once(tokenizer: Any, limit: int) -> None:
    Counting.running[:] = [0, 0]
    played(tokenizer, Counting(concurrency=limit), new(tokenizer, 7))
    assert Counting.running == [0, limit]


@dataclass(frozen=True, kw_only=True)
class Faulty(Environment):
    """Raises or hangs at the tries that `wrong` names ("raise" or "hang"), then answers."""

    wrong: tuple[str, ...] = ()
    tries: ClassVar[list[int]] = []

    def step(self, messages: Any, row: Any, state: Any) -> Turn:
        self.tries.append(1)
        fault = self.wrong[len(self.tries) - 1] if len(self.tries) <= len(self.wrong) else ""
        if fault == "hang":
            time.sleep(0.5)
        if fault == "raise":
            raise OSError("the tool is away")
        return Turn(reward=2.0)


@pytest.mark.parametrize(
    ("wrong", "options", "end", "error", "retries", "timeouts"),
    [
        (("raise",), {"retries": 1}, "stop", None, 1, 0),
        (("hang",), {"retries": 1, "turn_timeout": 0.1}, "stop", None, 1, 1),
        (("raise", "raise"), {"retries": 1}, "error", "OSError: the tool is away", 1, 0),
        (("hang",), {"turn_timeout": 0.1}, "timeout", "took longer than turn_timeout=0.1 s", 0, 1),
        (("hang",), {"episode_timeout": 0.1, "retries": 5}, "timeout", "took longer than episode_timeout=0.1 s", 0, 1),
        (("raise",), {"episode_timeout": 0.1, "retries": 1}, "timeout", "took longer than episode_timeout=0.1", 1, 1),
    ],
)
def test_a_step_is_tried_again_within_its_limits(
    tokenizer: Any,
    wrong: tuple[str, ...],
    options: dict[str, Any],
    end: str,
    error: str | None,
    retries: int,
    timeouts: int,
) -> None:
    Faulty.tries.clear()
    began = time.monotonic()
    (episode,) = played(tokenizer, Faulty(wrong=wrong, **options), new(tokenizer, 1))
    assert time.monotonic() - began < 2
    assert episode.finish_reason == end and (episode.error or "").startswith(error or "")
    assert (episode.error is None) == (error is None) and episode.rewards == ([2.0] if error is None else [0.0])
    assert (episode.account.retries, episode.account.timeouts) == (retries, timeouts)
    assert len(Faulty.tries) == retries + (end != "timeout" or "turn" in str(error) or retries == 0)


def test_the_time_of_an_episode_is_that_of_all_its_turns(tokenizer: Any) -> None:
    """0.08 s a turn and 0.2 s in all: the third turn is too much, however long other conversations take."""
    episodes = new(tokenizer, 3)
    played(tokenizer, Echo(end="", delays=(0.08,), episode_timeout=0.2, concurrency=1), episodes)
    for episode in episodes:
        assert episode.finish_reason == "timeout" and len(episode.rewards) == 3
        assert 0.15 < episode.account.seconds < 0.4


def test_what_an_environment_may_not_say_fails_its_own_episode(tokenizer: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Environment):
        def step(self, messages: Any, row: Any, state: Any) -> Any:
            if row["what"] == "words":
                return "words"
            observed = ({"role": "assistant", "content": "me"},) if row["what"] == "role" else ()
            return Turn(observed, reward=float("nan") if row["what"] == "nan" else 0.0)

    for what, error in (("words", "a Turn"), ("role", "the model's own"), ("nan", "no finite number")):
        (episode,) = played(tokenizer, Wrong(), new(tokenizer, 1, what=what))
        assert episode.finish_reason == "error" and error in str(episode.error)


def test_an_engine_that_fails_ends_the_conversations_with_its_own_error(tokenizer: Any) -> None:
    class Gone(Drawn):
        def generate(self, prompts: Any, params: Any, seeds: Any = None) -> list[Completion]:
            raise RunError("the server is gone")

    with EnvironmentPool({"environment": Echo()}) as pool, pytest.raises(RunError, match="the server is gone"):
        EpisodeRunner(Gone(tokenizer), tokenizer, pool, PARAMS, 400).run_async(new(tokenizer, 3), 2)


# Token in, token out


def test_an_engine_that_read_other_tokens_is_told_with_turn_and_tokens(tokenizer: Any) -> None:
    """As a server that tokenises the text of a conversation again: from the second turn on one token is another."""

    class Reads(Drawn):
        def generate(self, prompts: Any, params: Any, seeds: Any = None) -> list[Completion]:
            read = [[*p[:-2], 3, p[-1]] if len(p) > 10 else list(p) for p in prompts]
            drawn = super().generate(prompts, params, seeds)
            return [Completion(c.tokens, c.logprobs, "stop", 0, r) for c, r in zip(drawn, read, strict=True)]

    (episode,) = new(tokenizer, 1)
    with EnvironmentPool({"environment": Echo(end="")}) as pool, raises(RunError, "invalid_response") as caught:
        EpisodeRunner(Reads(tokenizer), tokenizer, pool, PARAMS, 400).run_lockstep([episode])
    text, sent = str(caught.value), [*episode.prompt, *episode.tokens]
    assert text.startswith("sample 0, turn 2: ")
    place = len(sent) - 2
    assert f"tokens {sent[place - 4 : place + 4]} became" in text and f"at position {place} of {len(sent)}" in text


def test_a_template_that_rewrites_what_it_said_before_is_told_with_turn_and_tokens(tokenizer: Any) -> None:
    """It hides every tool's answer but the last: later the text is another than was read."""
    other = ByteTokenizer().build()
    hiding = "(message.content if message.role != 'tool' or loop.index0 >= messages | length - 1 else 'gone')"
    other.chat_template = tokenizer.chat_template.replace("message.content", hiding).replace(
        "message['content']", hiding
    )
    assert hiding in other.chat_template
    with (
        EnvironmentPool({"environment": Echo(end="")}) as pool,
        raises(DataError, "invalid_template", keys=("data.chat_template",)) as caught,
    ):
        EpisodeRunner(Drawn(other), other, pool, PARAMS, 400).run_lockstep(new(tokenizer, 1))
    assert str(caught.value).startswith("sample 0, turn 2: ") and "message 2" in str(caught.value)
    assert "tokens [" in str(caught.value) and "gone" in str(caught.value)


# Several environments


def test_each_row_plays_in_the_environment_that_it_names(tokenizer: Any) -> None:
    episodes = [*new(tokenizer, 1, kind="echo"), *new(tokenizer, 1, kind="once")]
    with EnvironmentPool({"echo": Echo(end=""), "once": Counting(max_turns=1)}, "kind") as pool:
        EpisodeRunner(Drawn(tokenizer), tokenizer, pool, PARAMS, 400).run_lockstep(episodes)
        assert [pool.name_of(episode.row) for episode in episodes] == ["echo", "once"]
    assert [len(episode.rewards) for episode in episodes] == [4, 1]


def test_a_row_without_an_environment_is_refused_with_its_place() -> None:
    nodes = {"echo": Echo(), "once": Counting()}
    check_environment_rows(nodes, "kind", [("a.jsonl:1", {"kind": "echo"}), ("a.jsonl:2", {"kind": "once"})])
    with raises(
        ConfigError, "unknown_name", keys=("rollout.environments",), values=("a.jsonl:2", "twice", "echo, once")
    ):
        check_environment_rows(nodes, "kind", [("a.jsonl:2", {"kind": "twice"})])
    with raises(ConfigError, "unknown_name", keys=("rollout.environment_column",)) as caught:
        check_environment_rows(nodes, "kind", [("a.jsonl:3", {"q": 1})])
    assert "rollout.environment_column=<" in str(caught.value)
