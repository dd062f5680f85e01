"""Values of a reloaded export: log-probs, scores or embeddings, one layer on the device at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.models import transformers_compat
from automodel_cli.models.checkpoint_io import embedding_model
from automodel_cli.models.precision.layerwise_casting import Cast, cast_layers
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Head = ScoreHead | EmbeddingHead | None
"""What an export gives. None: log-probs."""


@dataclass(frozen=True)
class PictureDocument:
    """A document with pictures. Image tokens are in the input, and are not compared.

    `keywords`: inputs of the stock model beside the ids.
    """

    ids: Sequence[int]
    placeholder: int
    keywords: Callable[[], dict[str, Tensor]]

    @property
    def compared(self) -> Tensor:
        """Whether each token after the first is compared, bool `[T - 1]`."""
        return torch.tensor(self.ids)[1:] != self.placeholder


class Unfinished(Exception):
    """The comparison exceeds the available memory or time. The message contains the reason."""


@torch.no_grad()
def values_of_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    score_head: Head,
    device: torch.device,
    cast: Cast,
    deadline: float | None,
) -> list[Tensor]:
    """Return log-probs of each prompt's tokens after the first, or its scores, in fp32 on the CPU."""
    with cast_layers(model, cast, device, partial(_check_time, deadline)):
        if score_head is not None:  # transformers reads the score at the last token, so no padding
            rows = [torch.tensor([list(prompt)], device=device) for prompt in prompts]
            if isinstance(score_head, EmbeddingHead):
                return [embedding_model.values_of(model, row, score_head).cpu() for row in rows]
            return [model(input_ids=row, use_cache=False).logits[0].float().cpu().flatten() for row in rows]
        results = [torch.empty(0)] * len(prompts)
        for batch in _of_equal_length(prompts):
            ids_BT = torch.tensor([list(prompts[row]) for row in batch], device=device)
            for row, logprobs_T in zip(batch, _logprobs(model, ids_BT), strict=True):
                results[row] = logprobs_T
        return results


@torch.no_grad()
def values_of_documents(
    model: PreTrainedModel,
    documents: Sequence[PictureDocument],
    device: torch.device,
    cast: Cast,
    deadline: float | None,
) -> list[Tensor]:
    """Return the log-probs of each document's tokens that are compared, in fp32 on the CPU."""
    results: list[Tensor] = []
    for document in documents:
        transformers_compat.forget_positions(model)
        keywords = {
            name: value.to(device, cast.dtype if value.is_floating_point() else value.dtype)
            for name, value in document.keywords().items()
        }
        with cast_layers(model, cast, device, partial(_check_time, deadline)):
            (logprobs_T,) = _logprobs(model, torch.tensor([list(document.ids)], device=device), **keywords)
        results.append(logprobs_T[document.compared])
    return results


def _logprobs(model: PreTrainedModel, ids_BT: Tensor, **keywords: Tensor) -> Tensor:
    """Return log-probs of all tokens after the first, `[B, T - 1]`, in fp32 on the CPU."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False, **keywords).logits[:, :-1]
    logprobs_BT: Tensor = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    return logprobs_BT.cpu()


def _check_time(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise Unfinished("the comparison took longer than checkpoint.export_check_minutes")


def _of_equal_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return indices of prompts of equal length. They need no padding, which some families do not ignore.

    Packed rows have equal length, so that all prompts form one batch and each layer is cast once.
    """
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if len(prompt) > 1:
            groups.setdefault(len(prompt), []).append(row)
    return list(groups.values())
