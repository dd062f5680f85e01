"""Model FLOPs of a token of a dry run, for MFU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from automodel_cli.dryrun.synthetic_batches import Columns
from automodel_cli.models.hub.source import composite_config
from automodel_cli.models.model_part import model_parts
from automodel_cli.models.vision.work import load_of_shapes, meta_work
from automodel_cli.run.model_builder import flops_per_token
from automodel_cli.run.recipe import Recipe


def model_flops_per_token(
    recipe: Recipe, parts: Sequence[nn.Module], columns: Sequence[Columns], num_trained: int
) -> float | None:
    """Return the FLOPs of training on a token, in documents and with pictures like those of `columns`. None: not
    counted."""
    lengths = torch.tensor([length for one in columns for length in one.lengths], dtype=torch.float64)
    context = float(lengths.square().sum() / lengths.sum())
    part, *_ = model_parts(parts)
    of_text, vision = flops_per_token(recipe, part, context, num_trained), recipe.model.vision
    if of_text is None or vision is None:
        return of_text
    work, of_front = meta_work(composite_config(recipe.model)), 0.0
    for one in columns:
        assert one.pictures is not None, "the model reads pictures"
        tokens = int((one.input_ids == one.pictures.placeholder).sum())
        if tokens:
            of_front += work.training_flops(load_of_shapes(work, one.pictures.inputs, tokens), vision)
    return of_text + of_front / float(lengths.sum())
