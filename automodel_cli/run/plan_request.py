"""Convert a recipe into a plan request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel_cli.distributed.mesh_config import Layout

if TYPE_CHECKING:
    from automodel_cli.planning.plan import PlanRequest
    from automodel_cli.run.recipe import Recipe


def plan_request(recipe: Recipe, layout: Layout) -> PlanRequest:
    """Return the plan request of a recipe on these ranks."""
    from automodel_cli.objectives.base import request_of
    from automodel_cli.planning.plan import PlanRequest
    from automodel_cli.run.model_builder import row_layout

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
        masks=recipe.model.attn_implementation == "sdpa" and row_layout(recipe) != "whole",
    )
