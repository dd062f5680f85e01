"""Routed experts of an engine, from its forward to a batch.

Shapes: T tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np

from automodel_cli.config.errors import RunError


def compact_indices(chosen_TLK: np.ndarray) -> np.ndarray:
    """In the smallest integers that hold it: a byte for each expert of up to 256."""
    if chosen_TLK.dtype == np.uint8 or not chosen_TLK.size:
        return chosen_TLK.astype(np.uint8)
    fits = chosen_TLK.min() >= 0 and chosen_TLK.max() < 256
    return chosen_TLK.astype(np.uint8 if fits else np.int16)


def join_layers(of_stages: Sequence[tuple[Sequence[int], np.ndarray]]) -> np.ndarray:
    """Return `[T, L, K]` of all layers. Each stage contributes the indices of its layers and their experts."""
    num_layers = sum(len(numbers) for numbers, _ in of_stages)
    most = max(chosen.shape[2] for _, chosen in of_stages)
    joined = np.full((len(of_stages[0][1]), num_layers, most), -1, np.int16)
    for numbers, chosen in of_stages:
        joined[:, list(numbers), : chosen.shape[2]] = chosen
    return compact_indices(joined)


def first_known(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """Merge routed experts of a conversation that is read again at each turn. For each token, keep the experts of the
    first forward that read it, which selected them during generation."""
    if before is None or now is None:
        return now if before is None else before
    return compact_indices(np.concatenate([before.astype(np.int16), now[len(before) :].astype(np.int16)]))


def to_text(array: np.ndarray) -> str:
    """As text for JSON: shape, dtype and numbers."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def from_text(text: str) -> np.ndarray:
    """Decode the output of `to_text`, or of vLLM."""
    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


def decode_experts(text: str | None, num_read: int, decoded: Callable[[str], np.ndarray], *, start: str) -> np.ndarray:
    """Return `[T, L, K]` of the `num_read` tokens, decoded from the `text` of a response with `decoded`.

    Raises RunError if the response has none, or another number of tokens. `start` is the command of a server that
    returns routed experts, for the fix.
    """
    if text is None:
        raise RunError(
            "the server returned no routed experts, although it did before",
            code="invalid_response",
            keys=("rollout.replay_routing", "rollout.engine.url"),
            fix=start,
        )
    indices = compact_indices(decoded(text))
    if len(indices) != num_read:
        raise RunError(
            f"the server returned routed experts of {len(indices)} tokens, but read {num_read}",
            code="invalid_response",
            keys=("rollout.replay_routing", "rollout.engine.url"),
        )
    return indices


def from_int32(text: str) -> np.ndarray:
    """Decode SGLang's format: int32 without a shape."""
    return np.frombuffer(base64.b64decode(text), "<i4")
