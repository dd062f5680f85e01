"""What engines tell of the experts that tokens went to, on its way from a forward to a batch.

Shapes: T tokens, L layers with experts, K experts of a token.
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
    """`[T, L, K]` of all layers from what each stage of a pipeline knows: the numbers of its layers, and theirs."""
    num_layers = sum(len(numbers) for numbers, _ in of_stages)
    most = max(chosen.shape[2] for _, chosen in of_stages)
    whole = np.full((len(of_stages[0][1]), num_layers, most), -1, np.int16)
    for numbers, chosen in of_stages:
        whole[:, list(numbers), : chosen.shape[2]] = chosen
    return compact_indices(whole)


def first_known(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """Of a conversation that is read again at each turn: what was chosen when a token was read first, which for what
    the model drew is when it drew the next one."""
    if before is None or now is None:
        return now if before is None else before
    return compact_indices(np.concatenate([before.astype(np.int16), now[len(before) :].astype(np.int16)]))


def to_text(array: np.ndarray) -> str:
    """As text for JSON: shape, dtype and numbers."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def from_text(text: str) -> np.ndarray:
    """What `to_text` made; also what vLLM sends."""
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


def experts_told(text: str | None, num_read: int, decoded: Callable[[str], np.ndarray], *, start: str) -> np.ndarray:
    """`[T, L, K]` of the `num_read` tokens that were read, from an answer's `text`, which `decoded` understands. Raises
    RunError for an answer without them (the command that starts a server which tells them is `start`), or with those of
    other tokens."""
    if text is None:
        raise RunError(
            "the server returned no routed experts, although it did before",
            code="invalid_response",
            keys=("rollout.replay_routing", "rollout.engine.url"),
            fix=start,
        )
    found = compact_indices(decoded(text))
    if len(found) != num_read:
        raise RunError(
            f"the server returned routed experts of {len(found)} tokens, but read {num_read}",
            code="invalid_response",
            keys=("rollout.replay_routing", "rollout.engine.url"),
        )
    return found


def from_int32(text: str) -> np.ndarray:
    """What SGLang sends: int32, without their shape."""
    return np.frombuffer(base64.b64decode(text), "<i4")
