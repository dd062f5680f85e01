"""Compare log-probs of engine and trainer before the first step.

The check detects all differences between a server and the trainer: other weights, another tokenizer, a modified
distribution, or log-probs of another distribution. Training on such samples would use a policy gradient of a policy
that does not exist.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROMPTS, MAX_NEW_TOKENS = 16, 16
"""Maximum number of prompts over all ranks, and of generated tokens."""


Score = Callable[[SamplingTransform], list[Tensor]]
"""The trainer's log-probs [B, T] of the labels of every batch, under the distribution that the shaping makes."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One generated token: its id, and its log-probs in engine and trainer."""

    token: int
    engine: float
    trainer: float

    @property
    def gap(self) -> float:
        return abs(self.engine - self.trainer)


def check_agreement(
    update: Minibatch,
    samples: Sequence[Sample],
    score: Score,
    shaping: SamplingTransform,
    *,
    limit: float,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raise RunError if the log-probs of the samples and of `score(shaping)` differ by more than `limit` nats on
    average. Collective."""
    tokens = scored_tokens(update, score(shaping), samples)
    if mean_gap(tokens) <= limit:
        return
    # The most frequent mistake has its own message: if log-probs agree without temperature and filters, the engine
    # returns them from before these transforms.
    unshaped = scored_tokens(update, score(SamplingTransform()), samples)
    raise refusal(tokens, limit, tokenizer, unshaped=mean_gap(unshaped) <= limit)


def scored_tokens(
    update: Minibatch, trainer_logprobs: Sequence[Tensor], samples: Sequence[Sample]
) -> list[TokenLogprobs]:
    """Return all generated tokens of all ranks, in the order of the samples. Equal on every rank. Collective."""
    local: dict[int, list[TokenLogprobs]] = {}
    for spread, logprobs_BT in zip(update.spread, trainer_logprobs, strict=True):
        for row, first, number in spread:
            sample = samples[number]
            of_trainer = logprobs_BT[row, first : first + len(sample.tokens)].tolist()
            local[number] = [*map(TokenLogprobs, sample.tokens, sample.logprobs, of_trainer)]
    everywhere: list[Mapping[int, list[TokenLogprobs]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, local)
    merged = {number: tokens for of_rank in everywhere for number, tokens in of_rank.items()}
    return [token for number in sorted(merged) for token in merged[number]]


def mean_gap(tokens: Sequence[TokenLogprobs]) -> float:
    """Nats."""
    return statistics.fmean(token.gap for token in tokens)


def refusal(
    tokens: Sequence[TokenLogprobs], limit: float, tokenizer: PreTrainedTokenizerBase, *, unshaped: bool
) -> RunError:
    """Return the error of a `mean_gap` above `limit`. `unshaped`: the engine returns log-probs of the unmodified
    softmax."""
    worst = max(tokens, key=lambda token: token.gap)
    text = tokenizer.decode([worst.token])
    gap = (
        f"log-probs of the engine and of the trainer differ by {mean_gap(tokens):.3f} nats on average over "
        f"{len(tokens)} tokens. rollout.max_initial_logprob_gap={limit}. Largest difference: token {worst.token} "
        f"({text!r}), engine {worst.engine:.3f}, trainer {worst.trainer:.3f}. "
    )
    if unshaped:
        return RunError(
            f"{gap}The engine returns log-probs before temperature, top-k and top-p",
            code="logprob_mismatch",
            keys=("rollout.engine", "rollout.max_initial_logprob_gap"),
            fix="vllm serve MODEL --logprobs-mode processed_logprobs",
        )
    return RunError(
        f"{gap}Possible causes: the server serves another model, or did not receive the weights. It changes the "
        "distribution (logits processor, speculative decoding). It computes in another precision (fp8, int4). In the "
        "last case you can raise the limit",
        code="logprob_mismatch",
        keys=("rollout.engine", "rollout.max_initial_logprob_gap"),
        fix="read the log of the server, or rollout.max_initial_logprob_gap=<nats>",
    )
