"""A rollout engine of your own: the whole sequence through a copy of the model for every token. Slow, and short.

    automodel grpo llm -c quickstart_grpo \
        rollout.engine._target_=own_engine.WholeSequence --trust-package own_engine
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from automodel_cli.rollout.engines.base import Capabilities, EngineContext, resolve_seeds
from automodel_cli.rollout.engines.sampler.sampling import sample_tokens, uniforms
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream


@dataclass(frozen=True)
class WholeSequence:
    """`max_tokens`: a response never gets longer, whatever `rollout.max_new_tokens` is; null: as long as that."""

    capabilities: ClassVar[Capabilities] = Capabilities(logprobs=True, weight_updates=True)

    max_tokens: int | None = None

    def build(self, host: EngineContext) -> Engine:
        return Engine(host.replica(), host.stop_token_ids, self.max_tokens)


class Engine:
    capabilities = WholeSequence.capabilities

    def __init__(self, copy: HFEngine, stop_token_ids: list[int], max_tokens: int | None):
        self._copy, self._stops, self._max_tokens = copy, set(stop_token_ids), max_tokens
        self.weight_version = 0

    def update_weights(self, stream: WeightStream) -> None:
        self._copy.update_weights(stream)
        self.weight_version += 1

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        seeds = resolve_seeds(prompts, params, seeds)
        return [self._one(list(prompt), params, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _one(self, ids: list[int], params: SamplingParams, seed: int) -> Completion:
        limit = min(params.max_new_tokens, self._max_tokens or params.max_new_tokens)
        tokens: list[int] = []
        logprobs: list[float] = []
        model = self._copy.model
        for uniform in uniforms(seed, limit):
            logits_V = model(torch.tensor([ids + tokens], device=model.device)).logits[0, -1].float()
            token, logprob = sample_tokens(logits_V[None], params, uniform[None].to(model.device))
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] in self._stops:
                return Completion(tokens, logprobs, "stop", self.weight_version)
        return Completion(tokens, logprobs, "length", self.weight_version)
