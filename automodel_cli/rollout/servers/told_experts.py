"""What a server's answer tells of the experts that its tokens went to.

Shapes: T tokens that were read, L layers of the model, K experts of a token. Layers without experts tell 0.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np

from automodel_cli.config.errors import RunError
from automodel_cli.rollout.routing_record import compact


def experts_told(text: str | None, num_read: int, decoded: Callable[[str], np.ndarray], *, start: str) -> np.ndarray:
    """`[T, L, K]` of the `num_read` tokens that were read, from an answer's `text`, which `decoded` understands. Raises
    RunError for an answer without them (the command that starts a server which tells them is `start`), or with those of
    other tokens."""
    if text is None:
        raise RunError(
            "the server told no experts this time, which it did before",
            keys=("rollout.replay_routing", "rollout.engine.url"),
            fix=start,
        )
    found = compact(decoded(text))
    if len(found) != num_read:
        raise RunError(f"the server read {num_read} tokens and told the experts of {len(found)}")
    return found


def from_int32(text: str) -> np.ndarray:
    """What SGLang sends: int32, without their shape."""
    return np.frombuffer(base64.b64decode(text), "<i4")
