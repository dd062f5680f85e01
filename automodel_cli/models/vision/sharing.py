"""Measure whether a tower may read a picture once that several documents of a microbatch show.

The front end then runs on the distinct pictures alone, and their features are repeated (`Front`). On a small copy,
log-probs and gradients are compared with those of repeated pictures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.models import transformers_compat
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision.probe import documents_with_pictures, packed_rows, small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.small import shared_copy

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOLERANCE = 1e-4  # relative. float32; features of another picture are at least 1e-2.
_measured: dict[tuple[type, str, str], bool] = {}


def shares_pictures(composite_config: PretrainedConfig, processor: FamilyProcessor) -> bool:
    """Return whether repeated features give the numbers of repeated pictures. Cached."""
    key = (type(composite_config), composite_config.to_json_string(), processor.cache_key())
    if key not in _measured:
        try:
            with transformers_compat.quiet():
                _measured[key] = _agrees(composite_config, processor)
        except Exception:  # a family whose front end reads pictures in another way; it reads repeated ones
            _measured[key] = False
    return _measured[key]


def _agrees(composite_config: PretrainedConfig, processor: FamilyProcessor) -> bool:
    whole = shared_copy(composite_config)
    of_small = processor.resized(whole.config)
    one, _, two = documents_with_pictures(of_small)
    repeated = packed_rows([[two, one], [two, two]], of_small)
    counts = [int((ids_T == of_small.placeholder).sum()) for ids_T, _ in (two, one)]
    of_two, of_one = torch.arange(sum(counts)).split(counts)
    assert repeated.pictures is not None
    inputs, shared_P = of_small.inputs([*two[1], *one[1]]), torch.cat([of_two, of_one, of_two, of_two])
    once = replace(repeated, pictures=replace(repeated.pictures, inputs=inputs, shared_P=shared_P))
    want, got = (_numbers(small_part(whole).eval(), batch) for batch in (repeated, once))
    return all(
        float((value - want[name]).abs().max()) <= _TOLERANCE * float(want[name].abs().max().clamp(min=1e-3))
        for name, value in got.items()
    )


def _numbers(part: ModelPart, batch: Batch) -> dict[str, Tensor]:
    """Return log-probs of the labels, and the gradients of the front end of their sum, flat."""
    logprobs_BT = part(**batch.head_inputs(), **batch.model_inputs()).logprobs_BT
    logprobs_BT.sum().backward()
    assert part.front is not None
    gradients = [p.grad.flatten() for p in part.front.composite.parameters() if p.grad is not None]
    return {"logprobs": logprobs_BT.detach(), "gradients": torch.cat(gradients)}
