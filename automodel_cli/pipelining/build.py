"""From the sections of a recipe to a running pipeline: `parallelize` and `SingleStage` for `mesh.pp_size > 1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from automodel_cli.distributed.config import DDPConfig, FSDP2Config, ParallelizerConfig
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.parallelizer import materialize, parallelize, prepare_layers
from automodel_cli.models.part import ModelPart
from automodel_cli.pipelining.auto_pipeline import AutoPipeline
from automodel_cli.pipelining.config import PipelineConfig


def build_pipeline(
    part: ModelPart,
    mesh: Mesh,
    config: PipelineConfig,
    parallelizer: ParallelizerConfig,
    *,
    microbatch_size: int,
    num_microbatches: int,
) -> AutoPipeline:
    """The stages of this rank, parallelised and, like `part` (best on the meta device), still without weights.

    `num_microbatches` per optimizer step and data-parallel rank. Collective. Raises ConfigError.
    """
    pipeline = AutoPipeline(
        world_mesh=mesh,
        cp_axis_name="cp" if mesh.layout.cp > 1 else None,
        pp_microbatch_size=microbatch_size,
        pp_batch_size=microbatch_size * num_microbatches,
        defer_fsdp_grad_sync=parallelizer.defer_fsdp_grad_sync if isinstance(parallelizer, FSDP2Config) else True,
        device=mesh.device,
        **config.options(),
    )
    return pipeline.build(part, parallelize_fn=stage_parallelizer(mesh, parallelizer))


def stage_parallelizer(mesh: Mesh, config: ParallelizerConfig) -> Callable[..., nn.Module | None]:
    """A `parallelize_fn` for AutoPipeline. DDP comes without its wrapper: the pipeline itself sums gradients of whole
    parameters once per step."""

    def apply(part: nn.Module, **axes: Any) -> nn.Module | None:
        if not isinstance(config, DDPConfig):
            return parallelize(part, mesh, config)
        config.check_mesh(mesh.layout.to_config())
        prepare_layers(part, config, mesh.device.type)
        materialize(part, mesh.device)
        return None

    return apply
