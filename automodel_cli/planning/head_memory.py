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

from typing import cast

import torch
from torch import nn

from automodel_cli.data.head_output import HeadRequest
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.models.lm_head.head import default_chunk_size, kernel_chunk_size, kernels_allow
from automodel_cli.models.lm_head.scores import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.planning.request import PlanRequest

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


def _has_head_kernels(request: PlanRequest, part: ModelPart) -> bool:
    """Filters of sampling are not known here, nor how many tokens a column names: many."""
    asked = request.head
    return part.head.kind.name != "generic" and asked.token_ids is None and kernels_allow(asked, 1, filters=False)


def _head_weight(part: ModelPart) -> nn.Parameter:
    return cast(nn.Parameter, part.model.get_output_embeddings().weight)


def head_shape(request: PlanRequest, part: ModelPart, over_tp: frozenset[nn.Parameter]) -> tuple[int, int, int]:
    """Vocabulary on a rank, width, and tokens of a chunk."""
    weight = _head_weight(part)
    vocabulary, width = weight.shape
    if weight in over_tp:
        vocabulary //= request.layout.tp
    if _has_head_kernels(request, part):
        default = kernel_chunk_size(vocabulary, request.compute_dtype)
    else:
        default = default_chunk_size(vocabulary, torch.device("cuda"))
    return vocabulary, width, part.head.chunk_size or default


def planned_head_bytes(
    request: PlanRequest, part: ModelPart, over_tp: frozenset[nn.Parameter], tokens: int, *, adds: bool
) -> float:
    """What the head computes with on a GPU. A generic head holds as much of a chunk as one without kernels. With `adds`
    the gradient of its weight is in the sum over microbatches, where the strategy lets it be."""
    weight, kernels = _head_weight(part), _has_head_kernels(request, part)
    vocabulary, width, chunk = head_shape(request, part, over_tp)
    is_added = adds and part.head.kind.name != "generic" and _adds(request, weight, over_tp)
    return head_bytes(
        part.head.kind,
        request.head,
        request.compute_dtype,
        vocabulary=vocabulary,
        width=width,
        tokens=tokens,
        chunk=chunk,
        trained=weight.requires_grad and not is_added,
        kernels=kernels,
    )


def _adds(request: PlanRequest, weight: nn.Parameter, over_tp: frozenset[nn.Parameter]) -> bool:
    """Whether FSDP2 has a sum over microbatches, in a dtype of its own, to which the head adds in its products."""
    return weight not in over_tp and sums_in_float32(request)


def sums_in_float32(request: PlanRequest) -> bool:
    parallelizer = request.parallelizer
    if not isinstance(parallelizer, FSDP2Config) or not parallelizer.adds_in_products:
        return False
    storage, sums = parallelizer.storage(), request.layout.pp > 1 or request.num_microbatches > 1
    return sums and storage.defers and storage.reduce_dtype != storage.compute_dtype
