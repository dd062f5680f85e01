"""Compare an engine with the trainer before the first step, on a few samples of its prompts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.rollout.collection.sample_collector import SampleCollector
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.engines.sampler.sampling import shaping_of
from automodel_cli.rollout.minibatches.router_replay import RoutingReplay
from automodel_cli.rollout.monitoring.logprob_check import MAX_NEW_TOKENS, MAX_PROMPTS, check_agreement
from automodel_cli.rollout.samples import PackingConfig, pack_minibatches
from automodel_cli.run.frozen_models.reference_model import batch_logprobs, sampling_distribution

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


def check_engine(session: Trainer, config: RolloutConfig, source: SampleCollector, packing: PackingConfig) -> None:
    """Raise RunError if an engine with its own copy of the weights returns other log-probs than the trainer.
    Collective."""
    if source.engine.capabilities.live_weights:
        return
    loader, mesh = session.loader, session.mesh
    requests, seeds = source.requests(session.first_step + 1, loader.peek_step(), loader.position)
    size = config.group_size
    few = slice(0, size * max(1, MAX_PROMPTS // mesh.dp_size), size)  # one sample of each prompt
    params = config.params()
    params = dataclasses.replace(params, max_new_tokens=min(MAX_NEW_TOKENS, params.max_new_tokens))
    samples = source.responses(requests[few], params, seeds[few])
    RoutingReplay.check_recorded(samples)
    source.rest(weights_follow=False)
    every = [(number,) for number in range(len(samples))]
    (update,) = pack_minibatches(samples, every, 1, packing, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)

    def score(shaping: SamplingTransform) -> list[Tensor]:
        with sampling_distribution(session.model, shaping):
            return batch_logprobs(session.model.stages, update.batches, mesh.device)

    limit = config.max_initial_logprob_gap
    check_agreement(update, samples, score, shaping_of(params), limit=limit, tokenizer=session.tokenizer)
