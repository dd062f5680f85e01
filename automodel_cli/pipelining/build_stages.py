"""Build the stages of a run from the sections of a recipe, without weights.

The only place that checks for a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.distributed.strategies.ddp.config import DDPConfig
from automodel_cli.distributed.strategies.ddp.wrap import prepare_ddp_stage
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import SingleStage, Stages


def build_stages(
    part: ModelPart,
    mesh: Mesh,
    config: PipelineConfig | None,
    parallelizer: Strategy,
    *,
    num_microbatches: int,
    picture_layers: Callable[[], int] = lambda: 0,
) -> Stages:
    """Return the parallelized stages of this rank, without weights. Collective. Raises ConfigError.

    Args:
        part: the whole model, preferably on the meta device.
        config: None runs the model as a single stage.
        num_microbatches: per optimizer step and data-parallel rank.
        picture_layers: measures how many of the first layers read features of pictures. Called for a pipeline only.
    """
    if config is None:
        return SingleStage(parallelize(part, mesh, parallelizer))
    from automodel_cli.pipelining.mesh_axes import Axes  # Takes 0.2 s, which runs without a pipeline avoid.
    from automodel_cli.pipelining.stages import PipelineStages

    count = picture_layers()
    # With sequence parallelism, the last layer of a stage returns all tokens, to which no share can be added.
    part.first_layers = count + bool(count and parallelizer.axis_options().sequence_parallel)
    pipeline = PipelineStages(
        config,
        Axes.of(mesh),
        num_microbatches=num_microbatches,
        device=mesh.device,
        defer_sync=not parallelizer.reduces_every_microbatch,
    )
    return pipeline.build(part, parallelize_fn=lambda stage, **axes: prepare_stage(stage, mesh, parallelizer))


def prepare_stage(part: ModelPart, mesh: Mesh, parallelizer: Strategy) -> None:
    """Parallelize one pipeline stage in place. The pipeline sums the gradients of parameters that are not sharded."""
    if isinstance(parallelizer, DDPConfig):
        prepare_ddp_stage(part, mesh, parallelizer)
    else:
        parallelize(part, mesh, parallelizer)
