"""Samples that the built-in sampler is generating, and prompts whose samples wait for a slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from automodel_cli.rollout.types import Completion, FinishReason


@dataclass
class ActiveSample:
    """A sample in progress: `index` in the call, generated tokens, and its random stream of `limit` numbers (none for
    greedy decoding). `experts` `[n, layers, k]` are the routed experts of the tokens read, for layers of this rank."""

    index: int
    prompt: Sequence[int]
    limit: int
    uniforms: Sequence[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens whose keys are stored: all but the newest, which the next forward reads."""
        return len(self.prompt) + len(self.tokens) - 1

    def completion(self, stop_token_ids: Collection[int], weight_version: int) -> Completion | None:
        """Return the sample if it is finished."""
        stopped = self.tokens[-1] in stop_token_ids
        if not stopped and len(self.tokens) < self.limit:
            return None
        experts = np.concatenate(self.experts) if self.experts else None
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(self.tokens, self.logprobs, reason, weight_version, routed_experts=experts)

    @property
    def uniform(self) -> float:
        """The number that decides the next token."""
        return self.uniforms[len(self.tokens)] if self.uniforms else 0.0


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt with samples that have no slot yet. Its cache is in the slot after all others. `logits_1V` of its last
    token exist on the sampling rank. `experts` of its tokens, if they are recorded."""

    prompt: Sequence[int]
    logits_1V: Tensor | None
    experts: list[np.ndarray]

    def next_samples(self, waiting: deque[ActiveSample], free_slots: int) -> list[ActiveSample]:
        """Remove up to `free_slots` samples of this prompt from `waiting`."""
        new: list[ActiveSample] = []
        while waiting and len(new) < free_slots and waiting[0].prompt == self.prompt:
            new.append(waiting.popleft())
            new[-1].experts += self.experts
        return new


def next_prefill(waiting: deque[ActiveSample], free_slots: int, max_tokens: int) -> list[ActiveSample]:
    """Remove the sequences of the next prefill from `waiting`: at least one, at most `free_slots`, and prompts of up to
    `max_tokens` together. A longer prompt runs alone."""
    new: list[ActiveSample] = []
    num_tokens = 0
    while waiting and len(new) < free_slots:
        # A group of 8 samples costs its prompt once.
        shared = bool(new) and waiting[0].prompt == new[-1].prompt
        num_tokens += 0 if shared else len(waiting[0].prompt)
        if new and not shared and num_tokens > max_tokens:
            break
        new.append(waiting.popleft())
    return new
