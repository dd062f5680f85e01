"""A thread that generates beside the main thread's collectives, for an engine of every rank and one of the first."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.rollout.collection.async_queue import SampleQueue, SampleRequest
from automodel_cli.rollout.engines.base import Capabilities, Engine, sample_seed
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.types import Completion, SamplingParams
from tests import tiny
from tests.dist.harness import RankFailure, launch, launch_all

PARAMS = SamplingParams(max_new_tokens=6, temperature=0.8)
NUM_COLLECTIVES = 20


class Held(HFEngine):
    """Generates only once `go` is set, so that the main thread is certainly elsewhere."""

    go: threading.Event
    fails = False

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        assert threading.current_thread() is not threading.main_thread() and self.go.wait(60)
        if self.fails:
            raise RunError("the engine is out of order")
        return super().generate(prompts, params, seeds)


def held(*, fails: bool = False) -> Held:
    engine = Held.from_config(tiny.tiny_config("llama"), stop_token_ids=[2], pad_token_id=0)
    assert isinstance(engine, Held)
    engine.update_weights([list(tiny.build_hf("llama").named_parameters())])
    engine.go, engine.fails = threading.Event(), fails
    return engine


def all_asked() -> list[SampleRequest]:
    prompts = [Prompt(p, tiny.token_row(3 + p, seed=p).tolist(), [], {}, f"prompt {p}") for p in range(4)]
    return [(place, index, prompt) for place, prompt in enumerate(prompts) for index in range(2)]


def beside_collectives(rank: int, world: int, shared: bool, fails: bool) -> list[tuple[list[int], int]]:
    mine = held(fails=fails) if not shared or rank == 0 else None
    engine: Engine = RankZeroEngine(mine) if shared else mine  # type: ignore[assignment]
    engine.weight_version = 7
    ahead = SampleQueue(engine, torch.device("cpu"))
    asked = all_asked()[rank::world]
    ahead.begin(asked, PARAMS, [sample_seed(0, place, index) for place, index, _ in asked])
    for number in range(NUM_COLLECTIVES):  # as training makes them, while nothing can have been drawn yet
        total = torch.tensor(number)
        dist.all_reduce(total)
        assert total == number * world
    if mine is not None:
        mine.go.set()
    ahead.wait()
    drawn = ahead.take()
    ahead.close()
    assert drawn is not None and drawn.requests == asked and ahead.take() is None
    return [(completion.tokens, completion.weight_version) for completion in drawn.answers]


@pytest.mark.parametrize("shared", [False, True], ids=["every rank", "first rank"])
def test_the_samples_are_those_of_a_plain_call(shared):
    model = tiny.build_hf("llama")
    model.set_attn_implementation("sdpa")
    engine = HFEngine(model, stop_token_ids=[2], pad_token_id=0)
    asked = all_asked()
    seeds = [sample_seed(0, place, index) for place, index, _ in asked]
    want = [c.tokens for c in engine.generate([prompt.tokens for _, _, prompt in asked], PARAMS, seeds)]
    got = launch_all(beside_collectives, 2, shared, False)
    assert [got[i % 2][i // 2] for i in range(len(want))] == [(tokens, 7) for tokens in want]


def weights(seed: int) -> list[list[tuple[str, torch.Tensor]]]:
    return [list(tiny.build_hf("llama", seed=seed).named_parameters())]


def in_line(rank: int, world: int, shared: bool) -> list[list[tuple[list[int], int]]]:
    """Two rollouts with an update between them, all asked for before anything can have been drawn."""
    mine = held() if not shared or rank == 0 else None
    engine: Engine = RankZeroEngine(mine) if shared else mine  # type: ignore[assignment]
    queue, asked = SampleQueue(engine, torch.device("cpu"), 3), all_asked()[rank::world]
    seeds = [sample_seed(0, place, index) for place, index, _ in asked]
    queue.update(weights(1), 7)
    queue.begin(asked, PARAMS, seeds)
    queue.update(weights(2), 8)
    queue.begin(asked, PARAMS, seeds)
    assert len(queue) == 2
    if mine is not None:
        mine.go.set()
    queue.settle()
    drawn = [queue.take(), queue.take()]
    queue.close()
    assert queue.take() is None and len(queue) == 0
    return [[(completion.tokens, completion.weight_version) for completion in d.answers] for d in drawn if d]


@pytest.mark.parametrize("shared", [False, True], ids=["every rank", "first rank"])
def test_weights_change_between_two_rollouts_in_the_order_in_which_they_were_asked_for(shared):
    asked, want = all_asked(), []
    seeds = [sample_seed(0, place, index) for place, index, _ in asked]
    for seed in (1, 2):
        model = tiny.build_hf("llama", seed=seed)
        model.set_attn_implementation("sdpa")
        engine = HFEngine(model, stop_token_ids=[2], pad_token_id=0)
        want.append([c.tokens for c in engine.generate([prompt.tokens for _, _, prompt in asked], PARAMS, seeds)])
    got = launch_all(in_line, 2, shared)
    for number, version in enumerate((7, 8)):
        found = [got[i % 2][number][i // 2] for i in range(len(asked))]
        assert found == [(tokens, version) for tokens in want[number]]
    assert want[0] != want[1], "the test shows nothing"


class Instant:
    """Answers with the seed; its log-probs have no short decimal form."""

    weight_version, capabilities = 3, Capabilities(logprobs=True, weight_updates=True)

    def generate(self, prompts, params, seeds=None):
        logprobs = [[-1 / 3, -(seed % 97) / 7] for seed in seeds]
        drawn = zip(seeds, logprobs, strict=True)
        return [Completion([seed % 97, 5], of_seed, "stop", 3, token_versions=[3, 4]) for seed, of_seed in drawn]


def _state_of_two_ranks(rank: int, world: int) -> dict:
    ahead = SampleQueue(Instant(), torch.device("cpu"))
    assert ahead.state() is None
    asked = all_asked()[rank::world]
    ahead.begin(asked, PARAMS, [sample_seed(0, place, index) for place, index, _ in asked])
    state = ahead.state()  # waits for the thread, and takes nothing
    drawn = ahead.take()
    ahead.close()
    assert drawn is not None and drawn.requests == asked
    return json.loads(json.dumps(state))


def _restored(rank: int, world: int, state: dict) -> None:
    ahead, asked = SampleQueue(Instant(), torch.device("cpu")), all_asked()[rank::world]
    seeds = [sample_seed(0, place, index) for place, index, _ in asked]
    ahead.restore(state)
    drawn = ahead.kept(asked, PARAMS)
    assert drawn is not None and drawn.requests == asked
    assert drawn.answers == Instant().generate([], PARAMS, seeds)
    assert ahead.kept(asked, PARAMS) is None, "they are handed out once"
    ahead.restore(state)
    assert ahead.kept(asked, dataclasses.replace(PARAMS, temperature=0.7)) is None
    ahead.restore(state)
    assert ahead.kept([*asked, (9, 0, asked[0][2])], PARAMS) is None
    ahead.restore(state)
    assert ahead.kept(asked, PARAMS, oldest=4) is None, "they are too old"
    ahead.restore(None)
    assert ahead.kept(asked, PARAMS) is None


def test_what_was_drawn_goes_through_a_checkpoint_to_any_number_of_ranks():
    first, second = launch_all(_state_of_two_ranks, 2)
    assert first == second
    for world in (1, 2, 4):
        launch(_restored, world, first)


@pytest.mark.parametrize("shared", [False, True], ids=["every rank", "first rank"])
def test_what_the_thread_raises_is_raised_by_every_rank(shared):
    with pytest.raises(RankFailure, match="the engine is out of order"):
        launch(beside_collectives, 2, shared, True)
