"""Work of a vision tower in a run: for MFU, and for dealing rows over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from automodel_cli.models.hub import composite_text
from automodel_cli.models.vision.front import composite_on_meta
from automodel_cli.models.vision.work import FrontWork, load_of_blank, meta_work
from automodel_cli.training.metrics.flops import training_flops_per_token

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.data.pictures.reader import PictureProcessor
    from automodel_cli.data.preparation.dataset import PackedDataset
    from automodel_cli.models.model_part import ModelPart
    from automodel_cli.models.vision.config import VisionConfig


def tower_flops_per_token(vision: VisionConfig | None, part: ModelPart, data: PackedDataset) -> float | None:
    """Return the training FLOPs of tower and projector, averaged over all tokens of the data. 0 without pictures, None
    on a stage without them."""
    if vision is None or data.pictures is None:
        return 0.0
    if part.front is None:
        return None
    work = FrontWork.of(part.front)
    load = data.picture_load(load_of_blank(work, data.pictures.processor))
    return work.training_flops(load, vision) / max(1, data.num_tokens)


def image_token_cost(composite_config: PretrainedConfig, vision: VisionConfig, processor: PictureProcessor) -> float:
    """Return the training work of tower and projector for an image token, in units of a token of the text model."""
    work = meta_work(composite_config)
    load = load_of_blank(work, processor)
    of_token = training_flops_per_token(composite_config, 0.0, frozen_base=vision.text == "frozen")
    if of_token is None:  # linear attention and state spaces, whose matrices are all weights
        composite = composite_on_meta(composite_config, torch.float32)
        text = composite.get_submodule(str(composite_text.text_module(composite)))
        of_token = 6.0 * sum(param.numel() for param in text.parameters())
    return work.training_flops(load, vision) / max(1.0, load.tokens) / of_token
