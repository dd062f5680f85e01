"""`Stages` implementation for pipelines: any unmodified Hugging Face causal LM, any schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.sharded_module import handle_of
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.model_structure import tied_embedding
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.cut.stage_module import PATCHED, Ready, StagePart, as_model_part, cut_stage, num_streams
from automodel_cli.pipelining.cut.stage_plan import StagePlan, plan_stages
from automodel_cli.pipelining.error_keys import as_yaml
from automodel_cli.pipelining.mesh_axes import Axes, default_device
from automodel_cli.pipelining.schedule.schedules import check_composition
from automodel_cli.pipelining.summary import PipelineInfo
from automodel_cli.pipelining.timeline.simulator import even_costs, simulate
from automodel_cli.pipelining.timeline.svg import draw_svg
from automodel_cli.pipelining.torch_runtime import fsdp_compat, gradient_sync
from automodel_cli.pipelining.torch_runtime.broadcast import broadcast_tensors
from automodel_cli.pipelining.torch_runtime.torch_compat import Runtime, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LossFn = Callable[[HeadOutput, Batch], Tensor]


class PipelineStages:
    """Split a model into stages, connect them, and run steps of microbatches.

    Gradients are sums over microbatches and data-parallel ranks. Nothing is averaged or rescaled.
    """

    def __init__(
        self,
        config: PipelineConfig,
        axes: Axes,
        *,
        num_microbatches: int,
        device: torch.device | None = None,
        defer_sync: bool = True,
        defer_nested: bool = False,
        spelling: Callable[[], AbstractContextManager[None]] = as_yaml,
        ready: Ready = PATCHED,
    ):
        """Create a pipeline that is not built yet.

        Args:
            num_microbatches: checked by `build`, which makes `info.schedule` for it. A step may have another number,
                which is checked then.
            defer_sync: FSDP reduces gradients once per step.
            defer_nested: the same for FSDP modules inside a part without FSDP.
            spelling: context that translates the keys of errors.
            ready: forwards of the model that need no stand-ins.
        """
        self._config, self._axes, self._num_microbatches = config, axes, num_microbatches
        self.device = device or default_device()
        self._dtype: torch.dtype | None = None if config.dtype is None else getattr(torch, config.dtype)
        self._defer_sync, self._defer_nested, self._spelling = defer_sync, defer_nested, spelling
        self._ready = ready
        self._plan: StagePlan | None = None
        self._loss_fn: LossFn | None = None
        self._table_stages: set[int] = set()
        self._runtimes: dict[tuple[int, bool], Runtime] = {}
        self._info = PipelineInfo(False, None, False, False, None, None)

    # Build

    def build(
        self,
        model: ModelPart | PreTrainedModel,
        loss_fn: LossFn | None = None,
        parallelize_fn: Callable[..., nn.Module | None] | None = None,
    ) -> Self:
        """Split `model` and set up the stages of this rank. Collective over the pipeline.

        The model is not changed and preferably on the meta device.

        Args:
            loss_fn: `loss_fn(output, batch)`, the default loss of `forward_backward`.
            parallelize_fn: `parallelize_fn(part, world_mesh=, moe_mesh=, dp_axis_names=, ...)`, applied to each local
                part in place.

        Raises ConfigError for a wrong model or loss, a model whose split is not exact (with the layer that differs),
        stages that do not fit the ranks or the schedule, and wrappers that would compute wrong gradients.
        """
        part = as_model_part(model, self._ready)
        if loss_fn is not None and not callable(loss_fn):
            raise ConfigError(
                f"loss_fn must be callable as loss_fn(output, batch), not {type(loss_fn).__name__}",
                code="wrong_type",
                keys=("loss_fn",),
            )
        with self._spelling():
            return self._build(part, loss_fn, parallelize_fn)

    def _build(
        self, part: ModelPart, loss_fn: LossFn | None, parallelize_fn: Callable[..., nn.Module | None] | None
    ) -> Self:
        if self._axes.group.size() == 1:
            raise ConfigError(
                f"mesh axis {self._axes.pp_axis_name!r} has 1 rank, but a pipeline needs at least 2",
                code="mesh_size",
                keys=("mesh.pp_size",),
                fix="mesh.pp_size=2",
            )
        anatomy = check_split(part.model, self._ready)
        plan = plan_stages(self._config, part, anatomy, self._axes.group.size())
        plan.check(self._num_microbatches)  # Rejected here and not at the first step.
        rank = self._axes.group.rank()
        parts: list[nn.Module] = []
        for s in plan.of_rank(rank):
            cut = cut_stage(
                part,
                anatomy,
                layers=plan.layers[s],
                is_first=s == 0,
                is_last=s == plan.num_stages - 1,
                holds_depths=s == plan.depths,
                follows_depths=plan.follows_depths(s),
                ready=self._ready,
            )
            parts.append(self._parallelize(cut, parallelize_fn, plan))
        self._plan, self._loss_fn, self._runtimes = plan, loss_fn, {}
        self._table_stages = {0, *([plan.num_stages - 1] if tied_embedding(part.model) else [])}
        self._table_stages |= set() if plan.depths is None else {plan.depths}
        stages = self._make_stages(part, parts, plan, math.prod(anatomy.streams))
        first, last = plan.owner[0] == rank, plan.owner[-1] == rank
        self._info = PipelineInfo(True, None, first, last, parts, stages)
        self._info.schedule = self._runtime(self._num_microbatches, train=True)
        self._info.schedule.warm_up()
        return self

    def _parallelize(
        self, part: StagePart, parallelize_fn: Callable[..., nn.Module | None] | None, plan: StagePlan
    ) -> nn.Module:
        if not any(p.is_meta for p in part.parameters()):
            part.to(self.device)
        result = parallelize_fn and parallelize_fn(part, **self._axes.keywords())
        if isinstance(result, DistributedDataParallel):
            raise ConfigError(
                "parallelize_fn must not return a DDP wrapper, because its reducer cannot detect the last backward of "
                "a step",
                code="unsupported_combination",
                keys=("parallelizer",),
                fix="leave the part unwrapped: AutoPipeline sums plain gradients over dp_axis_names once per step",
            )
        assert result is None or result is part, "parallelize_fn must work in place"
        resharding = any(fsdp_compat.reshards_after_forward(m) for m in part.modules() if isinstance(m, FSDPModule))
        nested_sync = not isinstance(part, FSDPModule) and bool(fsdp_compat.fsdp_roots(part)) and not self._defer_nested
        if plan.splits_backward and (not self._defer_sync or nested_sync):
            switch = "patch_stage_backward_maybe_with_nosync" if nested_sync else "defer_fsdp_grad_sync"
            raise ConfigError(
                f"schedule={self._config.schedule_csv or self._config.schedule} splits the backward, so FSDP must "
                "reduce gradients after the last weight gradient of a step",
                code="requires_setting",
                keys=(switch,),
                fix=f"{switch}=true",
            )
        if self._config.named_schedule is not None:
            check_composition(self._config.named_schedule, reshard_after_forward=resharding)
        elif plan.splits_backward and resharding:
            raise ConfigError(
                "schedule_csv with I and W actions needs reshard_after_forward=false",
                code="requires_setting",
                keys=("schedule_csv",),
                fix="fully_shard(..., reshard_after_forward=False) in parallelize_fn",
            )
        return part

    def _make_stages(self, model_part: ModelPart, parts: list[nn.Module], plan: StagePlan, streams: int) -> list[Stage]:
        hidden_size = getattr(model_part.model.config.get_text_config(), "hidden_size", None)
        if hidden_size is None:
            raise ConfigError(
                f"{type(model_part.model).__name__} is not supported because its config has no hidden_size, the width "
                "between stages",
                code="not_supported_by_model",
                keys=("model",),
            )
        compute_dtype = self._agreed_dtype(model_part, parts)
        if self._dtype not in (None, compute_dtype):
            warn(
                "precision_loss",
                "stages compute in %s but send %s. Activations and gradients are rounded at every stage boundary",
                compute_dtype,
                self._dtype,
            )
        return [
            Stage(
                part,
                index,
                plan.num_stages,
                self.device,
                self._axes.group,
                hidden_size=streams * hidden_size,
                boundary_dtype=self._dtype or compute_dtype,
                compute_dtype=compute_dtype,
                defer_nested_sync=self._defer_nested,
                num_further=num_streams(model_part, True) - 1,
                further_arrives=plan.follows_depths(index),
                further_leaves=plan.follows_depths(index + 1),
                sends_gradients=plan.sends_gradients(index),
            )
            for index, part in zip(plan.of_rank(self._axes.group.rank()), parts, strict=True)
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
            agreed, src=dist.get_global_rank(self._axes.group, 0), group=self._axes.group, device=self.device
        )
        return agreed[0]

    # Run: the `Stages` protocol

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of this rank, in pipeline order."""
        return self._built().model_parts or []

    def forward_backward(
        self, batches: Sequence[Batch], loss: LossFn | None = None, request: HeadRequest = LOGPROBS
    ) -> Tensor:
        """See `Stages.forward_backward`. Microbatches may differ in length, also between steps."""
        info, loss = self._built(), loss or self._loss_fn
        if loss is None:
            raise ConfigError(
                "no loss is set: pass it to build(model, loss_fn) or forward_backward(batches, loss)",
                code="missing_key",
                keys=("loss_fn",),
            )
        with self._spelling():
            runtime = self._runtime(len(batches), train=True)
        plain, tied = self._plain_parameters(), self._tied_copies()
        # Two calls without an optimizer step between them: without this, the second call would reduce the first
        # gradients again.
        with gradient_sync.only_this_step([*plain, *tied]):
            results = self._run(runtime, batches, loss, request)
            gradient_sync.sum_over_groups(plain, self._axes.sum_groups())
            if tied:
                gradient_sync.sum_tied(tied, self._table_ranks(), self._axes.group)
        total = torch.zeros((), device=self.device)
        # Summed in microbatch order, whatever the order of the schedule. The loss is then bitwise independent of it.
        return torch.stack([results[i].detach() for i in range(len(batches))]).sum() if info.has_last_stage else total

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], reduce: LossFn, request: HeadRequest = LOGPROBS) -> list[Tensor]:
        """See `Stages.forward`.

        Values are reduced on the last stage and sent to all ranks. Gradients are not changed.
        """
        self._built()
        with self._evaluation_mode():
            results = self._run(self._runtime(len(batches), train=False), batches, reduce, request)
        return self._share([results[i] for i in sorted(results)])

    @contextmanager
    def in_float32(self) -> Iterator[bool]:
        """See `Stages.in_float32`. Hidden states between stages are float32 too."""
        stages = self._built().stages or []
        if not all(isinstance(part, FSDPModule) for part in self.parts):
            yield False
            return
        before = [(stage, stage.boundary_dtype, stage.compute_dtype) for stage in stages]
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(handle_of(part).in_float32())
            try:
                for stage in stages:
                    stage.boundary_dtype = stage.compute_dtype = torch.float32
                yield True
            finally:
                for stage, boundary_dtype, compute_dtype in before:
                    stage.boundary_dtype, stage.compute_dtype = boundary_dtype, compute_dtype

    def _run(
        self, runtime: Runtime, batches: Sequence[Batch], on_last: LossFn, request: HeadRequest
    ) -> dict[int, Tensor]:
        keywords = [{**batch.head_inputs(request), **batch.model_inputs()} for batch in batches]
        shapes = [self._boundary_shape(*batch.shape) for batch in batches]
        for stage in self._built().stages or ():
            stage.further = request.further
        return runtime.run(shapes, keywords, lambda output, index: on_last(output, batches[index]))

    def _runtime(self, num_microbatches: int, train: bool) -> Runtime:
        """Return the cached runtime for this number of microbatches."""
        info, plan, key = self._built(), self._plan, (num_microbatches, train)
        assert plan is not None and info.stages is not None
        if key not in self._runtimes:
            every = not self._defer_sync
            program = plan.program(num_microbatches) if train else plan.forward_program(num_microbatches)
            self._runtimes[key] = Runtime(info.stages, program, train=train, reduce_every_microbatch=every)
        return self._runtimes[key]

    def _share(self, values: list[Tensor]) -> list[Tensor]:
        """Broadcast the tensors of the last stage to all ranks of the pipeline."""
        source = dist.get_global_rank(self._axes.group, self._planned().owner[-1])
        return broadcast_tensors(values if self._info.has_last_stage else None, source, self._axes.group, self.device)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        modes = {module: module.training for part in self.parts for module in part.modules()}
        for part in self.parts:
            part.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    @property
    def info(self) -> PipelineInfo:
        """Summary of the stages on this rank. `enabled` is False before `build`."""
        return self._info

    def _built(self) -> PipelineInfo:
        if self._info.stages is None:
            raise RuntimeError("the pipeline is not built yet: call build(model) first")
        return self._info

    # Other methods of `Stages`

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self._axes.group

    @property
    def stage_owners(self) -> tuple[int, ...]:
        return self._planned().owner

    def schedule_svg(self, num_microbatches: int) -> str:
        """See `Stages.schedule_svg`. All stages have equal costs."""
        program = self._planned().program(num_microbatches)
        title = f"{program.schedule}, {num_microbatches} microbatches, stages drawn equally long"
        return draw_svg(simulate(program, even_costs(program)), title=title)

    @property
    def boundary_dtype(self) -> torch.dtype:
        stages = self._built().stages
        assert stages
        return stages[0].boundary_dtype

    def takes(self, num_microbatches: int) -> bool:
        plan = self._planned()
        try:
            plan.check(num_microbatches)
        except ConfigError:
            return False
        return num_microbatches % plan.pp_size == 0

    def forward_size(self, num_microbatches: int) -> int:
        return num_microbatches

    def _planned(self) -> StagePlan:
        self._built()
        assert self._plan is not None
        return self._plan

    def _boundary_shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the shape of the hidden states between stages, equal for all stages."""
        part = self.parts[0]
        assert isinstance(part, StagePart)
        return part.boundary_shape(rows, tokens)

    # Gradients that no wrapper sums

    def _plain_parameters(self) -> list[nn.Parameter]:
        """Return trainable parameters without FSDP, which are replicated over data-parallel ranks."""
        if not self._axes.sum_groups():
            return []
        return [p for part in self.parts for p in part.parameters() if p.requires_grad and not isinstance(p, DTensor)]

    def _tied_copies(self) -> list[nn.Parameter]:
        """Return the local copies of the embedding table of the first stage."""
        copies: list[nn.Parameter] = []
        for part in self.parts:
            assert isinstance(part, StagePart)
            copies += [p for name, p in part.named_parameters() if name in part.shared and p.requires_grad]
        return copies

    def _table_ranks(self) -> list[int]:
        """Return the ranks of the group with such copies."""
        owner = self._planned().owner
        return sorted({owner[stage] for stage in self._table_stages})
