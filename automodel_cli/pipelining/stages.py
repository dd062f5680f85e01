"""`Stages` implementation for pipelines: any unmodified Hugging Face causal LM, any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.sharded_module import handle_of
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.cut_stage import as_model_part
from automodel_cli.pipelining.cut.stage_module import PATCHED, Ready
from automodel_cli.pipelining.cut.stage_plan import StagePlan
from automodel_cli.pipelining.error_keys import as_yaml
from automodel_cli.pipelining.mesh_axes import Axes, default_device
from automodel_cli.pipelining.stage_builder import LocalStages, ParallelizeFn, StageBuilder
from automodel_cli.pipelining.summary import PipelineInfo
from automodel_cli.pipelining.timeline.simulator import even_costs, simulate
from automodel_cli.pipelining.timeline.svg import draw_svg
from automodel_cli.pipelining.torch_runtime import gradient_sync
from automodel_cli.pipelining.torch_runtime.broadcast import broadcast_tensors
from automodel_cli.pipelining.torch_runtime.runtime_compat import Runtime

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
        self._axes, self._num_microbatches = axes, num_microbatches
        self.device = device or default_device()
        dtype: torch.dtype | None = None if config.dtype is None else getattr(torch, config.dtype)
        self._defer_sync, self._spelling, self._ready = defer_sync, spelling, ready
        self._builder = StageBuilder(
            config, axes, num_microbatches, self.device, dtype, defer_sync, defer_nested, ready
        )
        self._local: LocalStages | None = None
        self._loss_fn: LossFn | None = None
        self._runtimes: dict[tuple[int, bool], Runtime] = {}
        self._info = PipelineInfo(False, None, False, False, None, None)

    # Build

    def build(
        self,
        model: ModelPart | PreTrainedModel,
        loss_fn: LossFn | None = None,
        parallelize_fn: ParallelizeFn | None = None,
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
            self._local = self._builder.build(part, parallelize_fn)
            self._loss_fn, self._runtimes = loss_fn, {}
            owner, rank = self._local.plan.owner, self._axes.group.rank()
            self._info = PipelineInfo(
                True, None, owner[0] == rank, owner[-1] == rank, [*self._local.parts], self._local.stages
            )
            self._info.schedule = self._runtime(self._num_microbatches, train=True)
        self._info.schedule.warm_up()
        return self

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
        self._local_stages().check_frozen(self._axes.group.rank())
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
        info, plan, key = self._built(), self._planned(), (num_microbatches, train)
        assert info.stages is not None
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

    def _local_stages(self) -> LocalStages:
        self._built()
        assert self._local is not None
        return self._local

    def _planned(self) -> StagePlan:
        return self._local_stages().plan

    def _boundary_shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the shape of the hidden states between stages, equal for all stages."""
        return self._local_stages().parts[0].boundary_shape(rows, tokens)

    # Gradients that no wrapper sums

    def _plain_parameters(self) -> list[nn.Parameter]:
        """Return trainable parameters without FSDP, which are replicated over data-parallel ranks."""
        if not self._axes.sum_groups():
            return []
        return [p for part in self.parts for p in part.parameters() if p.requires_grad and not isinstance(p, DTensor)]

    def _tied_copies(self) -> list[nn.Parameter]:
        """Return the local copies of the embedding table of the first stage."""
        copies: list[nn.Parameter] = []
        for part in self._local_stages().parts:
            copies += [p for name, p in part.named_parameters() if name in part.shared and p.requires_grad]
        return copies

    def _table_ranks(self) -> list[int]:
        """Return the ranks of the group with such copies."""
        owner = self._planned().owner
        return sorted({owner[stage] for stage in self._local_stages().with_table})
