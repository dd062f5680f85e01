"""Keywords of a forward pass for packed sequences, and the subset that a family accepts."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automodel_cli.data.batch import KEY_INDEX
from automodel_cli.models.document_masking import recurrent_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTED = "routed_experts"
"""Keyword of `ModelPart` that is not passed to the transformers model."""
_PACKING_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", KEY_INDEX, "context")


def model_inputs_for(ids_BT: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Return `Batch.model_inputs()` of one row with documents of these lengths."""
    bounds = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=ids_BT.device)
    positions_T = torch.cat([torch.arange(length, device=ids_BT.device) for length in lengths])
    inputs = {
        "input_ids": ids_BT,
        "position_ids": positions_T[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return inputs


def accepted_by(model: PreTrainedModel, model_inputs: dict[str, object]) -> dict[str, object]:
    """Return the keywords that the base model of this family accepts.

    Families without keywords for boundaries isolate documents only if no attention needs them. The packing probe
    rejects the others.
    """
    model_inputs = {name: value for name, value in model_inputs.items() if name != ROUTED}
    if recurrent_layers.runs_by_document(model):
        return recurrent_layers.full_row_inputs(model_inputs)
    if _takes_keywords(type(model.base_model).forward):
        return model_inputs
    return {k: v for k, v in model_inputs.items() if k not in _PACKING_KEYWORDS}


@functools.lru_cache
def _takes_keywords(forward: Callable[..., object]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
