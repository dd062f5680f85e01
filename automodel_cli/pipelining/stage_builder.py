"""Build the stages of one rank: cut the model, parallelize the parts, check their wrappers, and connect them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import fsdp_modules
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.model_structure import tied_embedding
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.cut.stage_module import Ready, StagePart, num_streams
from automodel_cli.pipelining.cut.stage_plan import StagePlan, plan_stages
from automodel_cli.pipelining.mesh_axes import Axes
from automodel_cli.pipelining.schedule.schedules import check_composition
from automodel_cli.pipelining.torch_runtime import fsdp_compat
from automodel_cli.pipelining.torch_runtime.torch_compat import Stage

ParallelizeFn = Callable[..., nn.Module | None]


@dataclass(frozen=True)
class LocalStages:
    """The stages of this rank, and the plan of all ranks. `with_table`: stages with a copy of the embedding table."""

    plan: StagePlan
    parts: list[StagePart]
    stages: list[Stage]
    with_table: set[int]

    def check_frozen(self, rank: int) -> None:
        """Raise RuntimeError if a stage trains parameters that were frozen when the stages were planned.

        Later stages compute no gradients for them.
        """
        for index, part in zip(self.plan.of_rank(rank), self.parts, strict=True):
            is_before_backward = index + 1 < self.plan.num_stages and not self.plan.sends_gradients(index + 1)
            trained = (name for name, param in part.named_parameters() if param.requires_grad)
            if is_before_backward and (name := next(trained, None)) is not None:
                raise RuntimeError(
                    f"{name} is trained, but stage {index} and all before it were frozen when the pipeline was built: "
                    "set requires_grad before build(model)"
                )


@dataclass(frozen=True)
class StageBuilder:
    """Options of `PipelineStages` that its build needs."""

    config: PipelineConfig
    axes: Axes
    num_microbatches: int
    device: torch.device
    dtype: torch.dtype | None
    defer_sync: bool
    defer_nested: bool
    ready: Ready

    def build(self, part: ModelPart, parallelize_fn: ParallelizeFn | None) -> LocalStages:
        """Cut the stages of this rank out of `part` and connect them. Collective over the pipeline."""
        if self.axes.group.size() == 1:
            raise ConfigError(
                f"mesh axis {self.axes.pp_axis_name!r} has 1 rank, but a pipeline needs at least 2",
                code="mesh_size",
                keys=("mesh.pp_size",),
                fix="mesh.pp_size=2",
            )
        anatomy = check_split(part.model, self.ready)
        plan = plan_stages(self.config, part, anatomy, self.axes.group.size())
        plan.check(self.num_microbatches)  # Rejected here and not at the first step.
        rank = self.axes.group.rank()
        parts: list[StagePart] = []
        for s in plan.of_rank(rank):
            cut = cut_stage(
                part,
                anatomy,
                layers=plan.layers[s],
                is_first=s == 0,
                is_last=s == plan.num_stages - 1,
                holds_depths=s == plan.depths,
                follows_depths=plan.follows_depths(s),
                ready=self.ready,
            )
            parts.append(self._parallelize(cut, parallelize_fn, plan))
        copies = {0, *([plan.num_stages - 1] if tied_embedding(part.model) else [])}
        copies |= set() if plan.depths is None else {plan.depths}
        return LocalStages(plan, parts, self._make_stages(part, parts, plan, math.prod(anatomy.streams)), copies)

    def _parallelize(self, part: StagePart, parallelize_fn: ParallelizeFn | None, plan: StagePlan) -> StagePart:
        # A stage may have buffers only (rotary tables).
        if not any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
            part.to(self.device)
        result = parallelize_fn and parallelize_fn(part, **self.axes.keywords())
        if isinstance(result, DistributedDataParallel):
            raise ConfigError(
                "parallelize_fn must not return a DDP wrapper, because its reducer cannot detect the last backward of "
                "a step",
                code="unsupported_combination",
                keys=("parallelizer",),
                fix="leave the part unwrapped: AutoPipeline sums plain gradients over dp_axis_names once per step",
            )
        assert result is None or result is part, "parallelize_fn must work in place"
        resharding = any(map(fsdp_compat.reshards_after_forward, fsdp_modules(part)))
        is_nested = not isinstance(part, FSDPModule) and bool(fsdp_compat.fsdp_roots(part))
        nested_sync = is_nested and not self.defer_nested
        if plan.splits_backward and (not self.defer_sync or nested_sync):
            switch = "patch_stage_backward_maybe_with_nosync" if nested_sync else "defer_fsdp_grad_sync"
            raise ConfigError(
                f"schedule={self.config.schedule_csv or self.config.schedule} splits the backward, so FSDP must "
                "reduce gradients after the last weight gradient of a step",
                code="requires_setting",
                keys=(switch,),
                fix=f"{switch}=true",
            )
        if self.config.named_schedule is not None:
            check_composition(self.config.named_schedule, reshard_after_forward=resharding)
        elif plan.splits_backward and resharding:
            raise ConfigError(
                "schedule_csv with I and W actions needs reshard_after_forward=false",
                code="requires_setting",
                keys=("schedule_csv",),
                fix="fully_shard(..., reshard_after_forward=False) in parallelize_fn",
            )
        return part

    def _make_stages(
        self, model_part: ModelPart, parts: Sequence[nn.Module], plan: StagePlan, streams: int
    ) -> list[Stage]:
        hidden_size = getattr(model_part.model.config.get_text_config(), "hidden_size", None)
        if hidden_size is None:
            raise ConfigError(
                f"{type(model_part.model).__name__} is not supported because its config has no hidden_size, the width "
                "between stages",
                code="not_supported_by_model",
                keys=("model",),
            )
        compute_dtype = self._agreed_dtype(model_part, parts)
        if self.dtype not in (None, compute_dtype):
            warn(
                "precision_loss",
                "stages compute in %s but send %s. Activations and gradients are rounded at every stage boundary",
                compute_dtype,
                self.dtype,
            )
        return [
            Stage(
                part,
                index,
                plan.num_stages,
                self.device,
                self.axes.group,
                hidden_size=streams * hidden_size,
                boundary_dtype=self.dtype or compute_dtype,
                compute_dtype=compute_dtype,
                defer_nested_sync=self.defer_nested,
                num_further=num_streams(model_part, True) - 1,
                further_arrives=plan.follows_depths(index),
                further_leaves=plan.follows_depths(index + 1),
                sends_gradients=plan.sends_gradients(index),
            )
            for index, part in zip(plan.of_rank(self.axes.group.rank()), parts, strict=True)
        ]

    def _agreed_dtype(self, model_part: ModelPart, parts: Sequence[nn.Module]) -> torch.dtype:
        """Return the dtype of the residual stream, as determined by the rank of the first stage.

        Stages may be empty.
        """
        first = next(model_part.parameters(), None)
        own = next(
            (d for part in parts if (d := fsdp_compat.fsdp_dtype(part))),
            first.dtype if first is not None else torch.bfloat16,
        )
        agreed = [own]
        dist.broadcast_object_list(
            agreed, src=dist.get_global_rank(self.axes.group, 0), group=self.axes.group, device=self.device
        )
        return agreed[0]
