"""Source of the samples of a run: engine, environments, rewards, and the queue of asynchronous rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.models.moe.router_hooks import Selectors
from automodel_cli.models.tokenizer import tokenizer_node
from automodel_cli.rollout.collection.async_queue import Generated, SampleQueue, SampleRequest
from automodel_cli.rollout.collection.multi_turn import (
    background_episodes,
    environment_fingerprint,
    is_model_parallel_rank_zero,
    play_episodes,
    scored_samples,
    unscored_samples,
)
from automodel_cli.rollout.collection.queue_checkpoint import QueueState
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.config_checks import check_routing_engine
from automodel_cli.rollout.engines.base import Engine, sample_seed
from automodel_cli.rollout.engines.context import EngineHost
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine
from automodel_cli.rollout.environments.episode import Episode
from automodel_cli.rollout.environments.pool import EnvironmentPool, check_environment_rows
from automodel_cli.rollout.minibatches.router_replay import RoutingReplay
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.rollout.rewards.row_checks import check_reward_rows as check_reward_rows
from automodel_cli.rollout.types import Completion, Sample, SamplingParams, WeightStream

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


@dataclass
class CollectionTimes:
    """Times of one rollout in seconds: reward computation, waiting for prefetched samples, and their generation."""

    reward: float = 0.0
    wait: float = 0.0
    ahead: float = 0.0


class SampleCollector:
    """Collect samples of all ranks with their rewards. With `all_judged`, every row needs a reward, because no other
    signal scores its samples. The constructor and all methods that generate are collective."""

    def __init__(
        self,
        session: Trainer,
        config: RolloutConfig,
        rewards: Mapping[str, RewardFunction],
        *,
        all_judged: bool,
        selectors: Selectors | None,
        replay: RoutingReplay | None,
    ):
        self.session, self.config, self.mesh = session, config, session.mesh
        check_reward_rows(rewards, self._rows(), all_judged=all_judged)
        self._rewards = RewardSum(rewards, num_helpers=config.num_reward_workers, required=all_judged)
        self._pool = self._build_pool()
        self._replay = replay
        self.engine: Engine = config.engine.build(
            EngineHost(session, shares_gpus=config.shares_gpus, selectors=selectors)
        )
        self._shared = self.engine if isinstance(self.engine, RankZeroEngine) else None
        self._check_engine()
        self._queue = self._build_queue()
        self.seconds = CollectionTimes()
        """Since somebody set them to 0."""

    # -- samples

    def sample(self, step: int, prompts: Sequence[Sequence[Prompt]]) -> list[Sample]:
        """Return the samples of all ranks for the last prompts of the loader, in the order of the prompts. Samples
        come from the queue (of this process or of the resumed checkpoint), or are generated now."""
        requests, seeds = self.requests(step, prompts, self.session.loader.position - self.config.prompts_per_step)
        samples = self._take_from_queue(step, requests)
        if samples is None:
            return self.judged(requests, self.config.params(), seeds)
        self.seconds.ahead += samples.seconds
        return self._judged(samples.requests, samples.answers)

    def judged(
        self, requests: Sequence[SampleRequest], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Sample]:
        """Generate answers now and return the samples of all ranks with rewards."""
        if self._queue is not None:
            self._queue.settle()
        answers: Sequence[Completion | Episode]
        if self._pool is None:
            answers = self.engine.generate([prompt.tokens for _, _, prompt in requests], params, seeds)
        else:
            answers = play_episodes(self.session, self._pool, self.engine, requests, params, seeds)
        return self._judged(requests, answers)

    def responses(
        self, requests: Sequence[SampleRequest], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Sample]:
        """Generate single responses now and return the samples of all ranks with reward 0."""
        answers = self.engine.generate([prompt.tokens for _, _, prompt in requests], params, seeds)
        return self._of_all_ranks(self._routed(unscored_samples(requests, answers, self.session.tokenizer)))

    def requests(
        self, step: int, prompts: Sequence[Sequence[Prompt]], first_place: int
    ) -> tuple[list[SampleRequest], list[int]]:
        """Return the requests and seeds of this rank. `first_place` is the index of the first prompt over all ranks."""
        local_prompts = [prompt for of_batch in prompts for prompt in of_batch]
        size, dp_size = self.config.group_size, self.mesh.dp_size
        # Example: 4 prompts on 2 ranks, first_place 8. Rank 0 has the places 8 and 10, rank 1 has 9 and 11. Seeds
        # depend on the place and not on the rank, so another number of ranks gives the same seeds.
        places = [first_place + i * dp_size + self.mesh.dp_rank for i in range(len(local_prompts))]
        requests = [
            (place, index, prompt) for place, prompt in zip(places, local_prompts, strict=True) for index in range(size)
        ]
        return requests, [sample_seed(self.session.recipe.seed, step, place, index) for place, index, _ in requests]

    def _judged(self, requests: Sequence[SampleRequest], answers: Sequence[Completion | Episode]) -> list[Sample]:
        """Responses with their rewards, of all ranks, by place and index."""
        scores, began = None, time.perf_counter()
        if is_model_parallel_rank_zero(self.mesh):
            tokenizer = self.session.tokenizer
            scores = self._routed(scored_samples(requests, answers, tokenizer, self._rewards, self._pool))
        samples = self._of_all_ranks(scores)
        self.seconds.reward += time.perf_counter() - began
        return samples

    def _of_all_ranks(self, mine: list[Sample] | None) -> list[Sample]:
        """Gather the samples of all ranks, sorted by prompt and index. Of the ranks that share prompts, only one
        contributes. Collective."""
        everywhere: list[list[Sample] | None] = [mine]
        if dist.get_world_size() > 1:  # else samples would be written and read again
            everywhere = everywhere * dist.get_world_size()
            dist.all_gather_object(everywhere, mine if is_model_parallel_rank_zero(self.mesh) else None)
        samples = [sample for of_rank in everywhere for sample in of_rank or ()]
        return sorted(samples, key=lambda sample: (sample.place, sample.index))

    def _routed(self, samples: list[Sample]) -> list[Sample]:
        return samples if self._replay is None else self._replay.of_layers(samples)

    # -- ahead of the steps that train on them

    def prefetch(self, step: int) -> None:
        """Start the missing rollouts of the next `max_off_policy_steps` steps, on the next prompts of the loader."""
        if self._queue is None:
            return
        loader, lag = self.session.loader, self.config.max_off_policy_steps
        for ahead in range(len(self._queue), min(lag, self.session.num_steps - step)):
            place = loader.position + ahead * self.config.prompts_per_step
            requests, seeds = self.requests(step + 1 + ahead, loader.peek_step(ahead), place)
            self._queue.begin(requests, self.config.params(), seeds, oldest=step + ahead - lag)

    @property
    def wait_seconds(self) -> float | None:
        """Return the seconds that training waited for prefetched samples. None if generation and training alternate."""
        return None if self._queue is None else self.seconds.wait

    def state(self) -> QueueState | None:
        """Return the generated samples that are not yet trained, or None."""
        return None if self._queue is None else self._queue.state()

    def restore(self, state: QueueState | None) -> None:
        """Restore the prefetched samples of a checkpoint."""
        if self._queue is not None and state is not None:
            self._queue.restore(state)

    def _take_from_queue(self, step: int, requests: list[SampleRequest]) -> Generated | None:
        """The samples of `requests`, which are the oldest that were begun."""
        if self._queue is None:
            return None
        began, oldest = time.perf_counter(), step - 1 - self.config.max_off_policy_steps
        rollout = self._queue.take()
        self.seconds.wait += time.perf_counter() - began
        if rollout is None:
            return self._queue.kept(requests, self.config.params(), oldest)
        assert [sample[:2] for sample in rollout.requests] == [sample[:2] for sample in requests]
        assert min((a.weight_version for a in rollout.answers), default=oldest) >= oldest, "older than allowed"
        return rollout

    # -- the engine

    @property
    def is_elsewhere(self) -> bool:
        """Return whether generation uses other devices than training."""
        return self._shared is not None and not self.config.shares_gpus

    def update(self, stream: WeightStream, version: int) -> None:
        """Update the engine to the weights of step `version`."""
        if self._queue is not None:
            self._queue.update(stream, version)
            return
        self.engine.update_weights(stream)
        self.engine.weight_version = version

    def rest(self, *, weights_follow: bool) -> None:
        """Free the GPUs for the trainer. Nothing is generated until the next weights or rollout."""
        if self._shared is not None:
            self._shared.rest(weights_follow=weights_follow)

    def idle_fraction(self) -> float | None:
        """Return the share of the time since the last call in which servers had no requests. None without servers."""
        return None if self._shared is None else self._shared.idle_fraction()

    def close(self) -> None:
        """Stop the threads and processes of generation and rewards."""
        if self._pool is not None:
            self._pool.stop()
        if self._queue is not None:
            self._queue.close()
        self._rewards.close()
        if self._pool is not None:
            self._pool.close()

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every row that rewards read, with its origin."""
        for dataset in (self.session.data.train, self.session.data.validation):
            for prompt in () if dataset is None else dataset.prompts:
                yield prompt.origin, prompt.row

    def _build_pool(self) -> EnvironmentPool | None:
        environments = self.config.played
        for environment in environments.values():
            environment.check()
        if self.config.environments:
            check_environment_rows(environments, self.config.environment_column, self._rows())
            return EnvironmentPool(environments, self.config.environment_column)
        return EnvironmentPool(environments) if environments else None

    def _build_queue(self) -> SampleQueue | None:
        if not self.config.max_off_policy_steps:
            return None
        draw, about = None, None
        if self._pool is not None:
            draw = background_episodes(self.session, self._pool, self.engine)
            about = environment_fingerprint(self.session.recipe.data, self.config)
        depth = self.config.max_off_policy_steps
        return SampleQueue(self.engine, self.mesh.device, depth, draw=draw, about=about)

    def _check_engine(self) -> None:
        capabilities = self.engine.capabilities
        if not (capabilities.logprobs and capabilities.token_ids and capabilities.weight_updates):
            raise ConfigError(
                f"{type(self.config.engine).__name__} is not supported for training, which needs token "
                "ids, log-probs of the sampled distribution and weight updates. The engine has "
                f"{capabilities}",
                code="not_supported",
                keys=("rollout.engine",),
                fix="rollout=sampler",
            )
        if capabilities.hub_names and self.session.model.parts[0].unties_head:
            raise ConfigError(
                f"{type(self.config.engine).__name__} does not support an adapter on a tied head: the "
                "server has the base model, whose head is tied to the embedding",
                code="unsupported_combination",
                keys=("model.lora.target_modules", "rollout.engine"),
                fix="model.lora.target_modules=all-linear",
            )
        self._check_vocabulary(capabilities.hub_names)
        check_routing_engine(self.config, capabilities)

    def _check_vocabulary(self, is_server: bool) -> None:
        """Raise ConfigError if a server has a smaller vocabulary than the model."""
        model = self.session.recipe.model
        if is_server and (node := tokenizer_node(model)) is not None and node.new_tokens:
            raise ConfigError(
                f"{type(self.config.engine).__name__} does not support model.tokenizer.add_tokens: the server has the "
                f"vocabulary of {model.pretrained}",
                code="unsupported_combination",
                keys=("model.tokenizer", "rollout.engine"),
                fix="rollout=sampler, or model.pretrained=<the export of a run that added the tokens>",
            )
