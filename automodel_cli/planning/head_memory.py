"""Memory of the head and the loss on their rank, while all activations of the microbatch are live.

With V rows of the weight on this rank, D their width, S tokens of a microbatch, c of a chunk, and b bytes a number of
what the head computes in if those are fewer than 4, else 0:

    4 V D                       the weight's gradient, summed over chunks in float32
    4 c V (1 + cap + entropy)   logits in float32; one more copy each for the slope of a soft cap and for entropies
    or, where that is more:
    b V D + c V (4 + 4 cap + b) a chunk's product in the compute dtype, where the device has no product that adds to
                                float32, with the chunk's gradient; afterwards the whole gradient in that dtype
    with kernels (models/lm_head/kernels.py) instead of both:
    (b or 4) c V, or b V D      a chunk's logits, whose place their gradient takes; afterwards the whole gradient
    2 S D (b or 4)              hidden states of the label tokens and their gradient, as if every token had a label
"""

from __future__ import annotations

import torch

from automodel_cli.data.head_output import HeadRequest
from automodel_cli.models.lm_head.fused_linear_logprobs import HeadKind

_FLOAT = torch.float32.itemsize


def head_bytes(
    kind: HeadKind,
    request: HeadRequest,
    dtype: torch.dtype,
    *,
    vocabulary: int,
    width: int,
    tokens: int,
    chunk: int,
    trained: bool = True,
    kernels: bool = False,
) -> float:
    """The sum above; `vocabulary` rows of a weight that is `trained`."""
    # A float32 weight needs no converted copy of its gradient.
    narrow = dtype.itemsize if dtype.itemsize < _FLOAT else 0
    weight = vocabulary * width if trained else 0
    chunk_logits = min(chunk, tokens) * vocabulary
    if kernels:
        working = max(chunk_logits * dtype.itemsize, narrow * weight)
        return _FLOAT * weight + working + 2.0 * tokens * width * dtype.itemsize
    cap = 1 if kind.name == "softcap" else 0
    computing = _FLOAT * chunk_logits * (1 + cap + int(request.entropy))
    adding = narrow * weight + chunk_logits * (_FLOAT * (1 + cap) + narrow)
    return _FLOAT * weight + max(computing, adding) + 2.0 * tokens * width * dtype.itemsize
