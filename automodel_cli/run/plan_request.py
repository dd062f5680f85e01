"""Convert a recipe into a plan request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh_config import Layout

if TYPE_CHECKING:
    from automodel_cli.planning.request import PlanRequest
    from automodel_cli.run.recipe import Recipe

_USUAL_MERGE = 2


ASSUMED_DOCUMENT = 700
"""Tokens of each document in packed rows, where the data has not been read."""


def plan_request(recipe: Recipe, layout: Layout, gpu: str = "h100") -> PlanRequest:
    """Return the plan request of a recipe on these ranks."""
    from automodel_cli.objectives.base import request_of
    from automodel_cli.planning.request import PlanRequest
    from automodel_cli.run.model_builder import flops_per_token, row_layout

    return PlanRequest(
        model=recipe.model,
        selection=recipe.train.selection,
        layout=layout,
        parallelizer=recipe.parallelizer,
        optimizer=recipe.optimizer,
        pipeline=recipe.pipeline,
        rows=recipe.train.microbatch_size,
        num_microbatches=recipe.train.num_microbatches(layout.dp),
        seq_len=recipe.data.seq_len,
        head=request_of(recipe.trained_objective),
        frozen=recipe.frozen_model,
        patches_per_image_token=_patches_per_image_token(recipe),
        masks=recipe.model.attn_implementation == "sdpa" and row_layout(recipe) != "whole",
        document=assumed_document(recipe),
        gpu=gpu,
        model_flops=partial(flops_per_token, recipe),
    )


def assumed_document(recipe: Recipe) -> int:
    """Return the tokens of each document where nothing is known of the data: rows that are not packed hold one
    document, or a pair of them.
    """
    whole: int = recipe.data.seq_len
    if recipe.data.packing != "none" or recipe.kind == "grpo":
        return min(ASSUMED_DOCUMENT, whole)
    return whole // (2 if "pairs_P2" in getattr(recipe.objective, "columns", ()) else 1)


def _patches_per_image_token(recipe: Recipe) -> float:
    """Return the ratio of the blank picture. Without a processor, that of the merge size."""
    if recipe.model.vision is None:
        return 0.0
    from automodel_cli.models.hub.source import composite_config
    from automodel_cli.models.vision.processor import shared_processor
    from automodel_cli.models.vision.work import load_of_blank, meta_work

    config = composite_config(recipe.model)
    try:
        processor = shared_processor(recipe.model)
    except ConfigError:
        side = getattr(getattr(config, "vision_config", None), "spatial_merge_size", _USUAL_MERGE)
        return float(side**2)
    load = load_of_blank(meta_work(config), processor)
    return load.patches / max(1.0, load.tokens)
