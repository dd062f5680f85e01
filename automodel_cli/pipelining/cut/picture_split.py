"""Measure on a small copy which decoder layers of a vision-language model must share a stage with its front end.

Some text models add features of pictures to the hidden states after their first layers (deepstack). Only the first
stage computes these features, so it must contain these layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automodel_cli.models import transformers_compat
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision import probe, shares
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.small import shared_copy
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.model_structure import SplitError
from automodel_cli.pipelining.cut.split_check import TOLERANCE, check_split, forward_backward, take_gradients

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_measured: dict[tuple[type, str, str], int] = {}


def layers_of_first_stage(composite_config: PretrainedConfig, processor: FamilyProcessor) -> int:
    """Return how many decoder layers the first stage must contain. Cached. Takes a second.

    The small copy runs packed documents with pictures unsplit and as three stages. Raises SplitError if log-probs or
    gradients differ.
    """
    key = (type(composite_config), composite_config.to_json_string(), processor.cache_key())
    if key not in _measured:
        with transformers_compat.quiet():
            whole = shared_copy(composite_config)
            _measured[key] = measure(probe.small_part(whole).eval(), processor.resized(whole.config))
    text = composite_config.get_text_config()
    if _measured[key] >= text.num_hidden_layers:
        raise SplitError(str(composite_config.model_type), "all its layers add features of pictures")
    return _measured[key]


def measure(part: ModelPart, processor: FamilyProcessor) -> int:
    """See `layers_of_first_stage`. `part` has a front end, and its weights are in memory."""
    front = part.front
    assert front is not None
    batch = probe.probe_rows(processor)
    pictures = batch.pictures
    assert pictures is not None
    with torch.no_grad():
        found = front(batch.input_ids_BT, pictures)
    is_shown_BT = batch.input_ids_BT == pictures.placeholder
    if names := shares.names_by_token(found, is_shown_BT):
        raise SplitError(part.model, f"all its layers read {names[0]}, which the front end computes")
    needed = shares.num_feature_layers(found, is_shown_BT)
    inputs = {**batch.head_inputs(), **batch.model_inputs()}
    unsplit = _results([part], inputs)
    split = _results(_stages(part, max(needed, 1)), inputs)
    for name, want in unsplit.items():
        got = split.get(name)
        if got is None or not float((got - want).abs().max()) <= TOLERANCE * max(float(want.abs().max()), 1e-3):
            raise SplitError(part.model, f"{name} differs between its stages and the unsplit model with pictures")
    return needed


def _stages(part: ModelPart, first: int) -> list[ModelPart]:
    anatomy = check_split(part.model)
    count = len(list(part.model.get_submodule(anatomy.layers).children()))
    second = min(first + 1, count)
    cuts = [range(first), range(first, second), range(second, count)]
    return [cut_stage(part, anatomy, layers=layers, is_first=s == 0, is_last=s == 2) for s, layers in enumerate(cuts)]


def _results(parts: list[ModelPart], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return log-probs and all gradients of their sum."""
    logprobs_BT = forward_backward(parts, inputs)
    return {"the log-prob": logprobs_BT, **take_gradients(parts)}
