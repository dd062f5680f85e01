"""Sample tokens from logits. The trainer scores them under the same distribution
(`models/lm_head/sampling_transform.py`).

Shapes: S positions (one row of a batch during decoding), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from automodel_cli.models.lm_head.sampling_transform import SamplingTransform

if TYPE_CHECKING:
    from automodel_cli.rollout.types import SamplingParams


def shaping_of(params: SamplingParams) -> SamplingTransform:
    """Transform of logits by `params`. Greedy decoding reports the plain softmax."""
    return SamplingTransform() if params.greedy else SamplingTransform(params.temperature, params.top_k, params.top_p)


def draw(logprobs_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """Return tokens `[S]` by inverting the cumulative distribution at `uniform_S` (float64 in [0, 1)).

    One number decides one token, so a sample depends only on its own random stream. Example: probabilities 0.2, 0.5,
    0.3 have the cumulative sums 0.2, 0.7, 1.0, and the number 0.6 selects token 1. Sums are float64: in float32,
    rounding over a large vocabulary reaches the probability of a rare token.
    """
    cumulative_SV = logprobs_SV.double().exp().cumsum(-1)
    # Times the last sum, which rounding leaves slightly different from 1.
    target_S1 = uniform_S[:, None] * cumulative_SV[:, -1:]
    return torch.searchsorted(cumulative_SV, target_S1, right=True)[:, 0].clamp(max=logprobs_SV.shape[-1] - 1)


def sample_tokens(logits_SV: Tensor, params: SamplingParams, uniform_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(tokens_S, logprobs_S)`: the next tokens, and their fp32 log-probs under the sampled distribution."""
    logprobs_SV = shaping_of(params)(logits_SV).log_softmax(-1)
    tokens_S = logprobs_SV.argmax(-1) if params.greedy else draw(logprobs_SV, uniform_S)
    return tokens_S, logprobs_SV.gather(-1, tokens_S[:, None])[:, 0]


def uniforms(seed: int, count: int) -> Tensor:
    """The random stream of one sample: `count` float64 numbers in [0, 1), the same on every machine."""
    return torch.tensor(streams([seed], [count])[0], dtype=torch.float64)


def streams(seeds: Sequence[int], counts: Sequence[int]) -> list[list[float]]:
    """Return `uniforms` of many samples, independent of the other samples of the call. One generator is reused with
    the key of each stream: creating a generator costs five times as much as sampling."""
    bits = np.random.Philox(key=0)
    generator, start = np.random.Generator(bits), bits.state
    numbers = []
    for seed, count in zip(seeds, counts, strict=True):
        start["state"]["key"][:] = seed % 2**64, seed // 2**64
        bits.state = start
        numbers.append(generator.random(count).tolist())
    return numbers
