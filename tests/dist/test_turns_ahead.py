"""Conversations in the queue of rollouts: weights that change between two turns, environments that fail or hang, ranks
that share prompts, and the way through a checkpoint."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.collection.async_queue import SampleQueue, SampleRequest
from automodel_cli.rollout.collection.multi_turn import background_episodes
from automodel_cli.rollout.engines.base import Capabilities, sample_seed
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.rollout.types import Completion, SamplingParams
from tests.dist.harness import launch, launch_all

PARAMS = SamplingParams(max_new_tokens=8)
LIMIT = 60


class Letters:
    """Draws letters from the seed and the prompt alone; counts its updates from 40 on. Calls with more than `held`
    tokens of prompt count themselves in `waiting`, and wait for `go`."""

    def __init__(self, tokenizer: Any, *, in_flight: bool = False, held: int | None = None):
        self.tokenizer, self.held, self.go = tokenizer, held, threading.Event()
        self.waiting = threading.Semaphore(0)
        self.weight_version = 40
        self.capabilities = Capabilities(
            logprobs=True, weight_updates=True, in_flight_updates=in_flight, at_once=8 if in_flight else 1
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        assert seeds is not None and threading.current_thread() is not threading.main_thread()
        if self.held is not None and len(prompts[0]) > self.held:
            self.waiting.release()
            assert self.go.wait(LIMIT)
        found = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            number = sample_seed(seed, *prompt) % 1000
            tokens = [*self.tokenizer(f"{number}")["input_ids"], self.tokenizer.eos_token_id]
            found.append(Completion(tokens, [-number / 7] * len(tokens), "stop", self.weight_version))
        return found

    def update_weights(self, stream: Any) -> None:
        for _ in stream:
            pass
        self.weight_version += 1


@dataclass(frozen=True, kw_only=True)
class Moody(Environment):
    """Goes on after the first message; raises where the row says so, or waits without an end."""

    async def step(self, messages: Any, row: Any, state: Any) -> Turn:
        if row.get("does") == "raises":
            raise KeyError("no such tool")
        if row.get("does") == "hangs":
            await asyncio.sleep(1000)
        return Turn(({"role": "user", "content": "more"},), reward=1 / 3, done=state is not None, state=object())


def requests_of(tokenizer: Any, does: Sequence[str | None]) -> list[SampleRequest]:
    said = [{"role": "user", "content": "go"}]
    tokens = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
    rows = [{} if what is None else {"does": what} for what in does]
    return [(i, 0, Prompt(i, list(tokens), said, row, f"prompt {i}")) for i, row in enumerate(rows)]


def queue_of(engine: Any, pool: EnvironmentPool, tokenizer: Any, depth: int = 1, **layout: int) -> SampleQueue:
    mesh = build_mesh(MeshConfig(**layout).resolve(torch.distributed.get_world_size()), "cpu")
    data = SimpleNamespace(chat_template="auto", seq_len=400)
    session: Any = SimpleNamespace(recipe=SimpleNamespace(data=data), tokenizer=tokenizer, mesh=mesh)
    draw = background_episodes(session, pool, engine)
    return SampleQueue(engine, torch.device("cpu"), depth, draw=draw, about={"episodes": "these"})


def seeds_of(requests: Sequence[SampleRequest]) -> list[int]:
    return [sample_seed(0, place, index) for place, index, _ in requests]


def content(episode: Any) -> tuple[Any, ...]:
    return (
        *(episode.name, list(episode.prompt), episode.messages, episode.row, episode.tokens, episode.logprobs),
        *(
            episode.generated,
            episode.response_messages,
            episode.rewards,
            episode.finish_reason,
            episode.error,
            episode.account,
        ),
        *(episode.weight_versions, episode.versions),
    )


def weights_change_between_turns(rank: int, world: int) -> list[Any]:
    tokenizer = ByteTokenizer().build()
    everybodys = requests_of(tokenizer, [None] * 4)
    first_turn = len(everybodys[0][2].tokens)
    mine = Letters(tokenizer, in_flight=True, held=first_turn) if rank == 0 else None
    engine = RankZeroEngine(mine)  # type: ignore[arg-type]
    engine.weight_version = 7
    with EnvironmentPool({"environment": Moody()}) as pool:
        queue = queue_of(engine, pool, tokenizer)
        requests = everybodys[rank::world]
        queue.begin(requests, PARAMS, seeds_of(requests))
        if mine is not None:  # all first messages are drawn once each conversation asks for its second
            assert all(mine.waiting.acquire(timeout=LIMIT) for _ in everybodys)
        queue.update([], 8)
        if mine is not None:
            mine.go.set()
        drawn = queue.take()
        queue.close()
    assert drawn is not None and drawn.requests == requests
    return [(e.weight_version, e.weight_versions, e.versions, e.generated) for e in drawn.answers]  # type: ignore[union-attr]


def test_each_token_knows_its_weights_where_they_change_between_two_turns():
    for of_rank in launch_all(weights_change_between_turns, 2):
        assert len(of_rank) == 2
        for oldest, of_turns, of_tokens, generated in of_rank:
            first = generated.index(False)  # what the environment said counts as the message before it
            last = len(generated) - generated[::-1].index(False)
            assert oldest == 7 and of_turns == [7, 8] and all(generated[last:]) and not any(generated[first:last])
            assert of_tokens == [7] * last + [8] * (len(generated) - last)


def through_a_checkpoint(rank: int, world: int, kept: Any = None) -> Any:
    """Ranks that share prompts: one plays, and all keep the same."""
    tokenizer = ByteTokenizer().build()
    requests = requests_of(tokenizer, [None, "raises", None])
    with EnvironmentPool({"environment": Moody()}) as pool:
        queue = queue_of(Letters(tokenizer), pool, tokenizer, tp_size=world, dp_size=1)
        if kept is not None:
            queue.restore(kept)
            assert queue.kept(requests, PARAMS, oldest=41) is None, "they are too old"
            queue.restore(kept)
            queue._about["episodes"] = "others"
            assert queue.kept(requests, PARAMS) is None, "they are those of another environment"
            queue._about["episodes"] = "these"
            queue.restore(kept)
            drawn = queue.kept(requests, PARAMS)
            assert drawn is not None
            return [content(answer) for answer in drawn.answers]
        queue.begin(requests, PARAMS, seeds_of(requests))
        state = json.loads(json.dumps(queue.state()))
        drawn = queue.take()
        queue.close()
        assert drawn is not None and len(drawn.answers) == (3 if rank == 0 else 0)
        return state, [content(answer) for answer in drawn.answers]


def test_conversations_go_through_a_checkpoint_to_the_bit():
    (state, drawn), (other, nothing) = launch_all(through_a_checkpoint, 2)
    assert state == other and not nothing
    for world in (1, 2):
        for kept in launch_all(through_a_checkpoint, world, state):
            assert kept == drawn
    ends = [episode[9] for episode in drawn]
    assert ends == ["stop", "error", "stop"] and drawn[1][10] == "KeyError: 'no such tool'"


def an_environment_hangs(rank: int, world: int) -> None:
    tokenizer = ByteTokenizer().build()
    requests = requests_of(tokenizer, [None, "hangs", "raises", None])
    with EnvironmentPool({"environment": Moody(turn_timeout=0.3)}) as pool:
        queue = queue_of(Letters(tokenizer), pool, tokenizer, depth=2)
        for _ in range(2):
            queue.begin(requests, PARAMS, seeds_of(requests))
        for _ in range(2):
            drawn = queue.take()
            assert drawn is not None
            assert [answer.finish_reason for answer in drawn.answers] == ["stop", "timeout", "error", "stop"]
        queue.close()
        pairs = zip(seeds_of(requests), requests, strict=True)
        alone = [Episode(seed=seed).about(0, request[2]) for seed, request in pairs]
        player = EpisodeRunner(Letters(tokenizer), tokenizer, pool, PARAMS, 400)  # type: ignore[arg-type]
        thread = threading.Thread(target=player.run_lockstep, args=(alone,))
        thread.start()
        thread.join(LIMIT)
        untimed = [content(replace(e, account=Episode().account)) for e in (*drawn.answers, *alone)]  # type: ignore[type-var]
        assert untimed[:4] == untimed[4:], "the queue changes what is played"
    with EnvironmentPool({"environment": Moody()}) as pool:  # no limit: the end of the run is one
        queue = queue_of(Letters(tokenizer), pool, tokenizer)
        queue.begin(requests, PARAMS, seeds_of(requests))
        began = time.monotonic()
        pool.stop()
        queue.close()
        assert time.monotonic() - began < LIMIT


def test_an_environment_that_hangs_or_raises_keeps_neither_the_queue_nor_the_end_of_the_run():
    launch(an_environment_hangs, 1)
