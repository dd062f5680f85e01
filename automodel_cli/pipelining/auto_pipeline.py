"""`AutoPipeline`: any Hugging Face causal LM, unmodified, over the ranks of a pipeline, as `Stages`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.models.part import ModelPart
from automodel_cli.pipelining import contributions, listing, torch_compat
from automodel_cli.pipelining.axes import Axes, check_sizes, check_switches, default_device
from automodel_cli.pipelining.eager_runtime import EagerConnections, EagerRuntime
from automodel_cli.pipelining.programs import Program
from automodel_cli.pipelining.runtime_choice import RuntimeChoice
from automodel_cli.pipelining.schedules import check_composition
from automodel_cli.pipelining.stage import StagePart, cut_stage
from automodel_cli.pipelining.stage_plan import Choice, StagePlan, plan_stages
from automodel_cli.pipelining.support import check_split
from automodel_cli.pipelining.torch_compat import Runtime, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

LossFn = Callable[[Tensor, Batch], Tensor]
AnyRuntime = Runtime | EagerRuntime


@dataclass
class PipelineInfo:
    """What this rank runs. `model_parts` and `stages` are None before `build`; under a V placement rank 0 has both
    ends."""

    enabled: bool
    schedule: AnyRuntime | None
    has_first_stage: bool
    has_last_stage: bool
    model_parts: list[nn.Module] | None
    stages: list[Stage] | None


class AutoPipeline:
    """Cuts a model into stages, wires them, and runs steps of microbatches through them.

    Example::

        pipeline = AutoPipeline(world_mesh=mesh, pp_schedule="interleaved_1f1b", pp_batch_size=8)
        pipeline.build(part, parallelize_fn=lambda part, **axes: parallelize(part, mesh, config))
        loss = pipeline.forward_backward(batches, lambda logprobs_BT, batch: -logprobs_BT.sum() / weight)

    Every gradient is a plain sum over microbatches and data-parallel ranks: nothing is averaged or rescaled.
    """

    def __init__(
        self,
        *,
        world_mesh: DeviceMesh | Mesh | None = None,
        moe_mesh: DeviceMesh | None = None,
        pp_axis_name: str = "pp",
        dp_axis_names: Sequence[str] = ("dp",),
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: Sequence[str] | None = None,
        pp_schedule: str | None = "1f1b",
        pp_schedule_csv: str | None = None,
        pp_microbatch_size: int = 1,
        pp_batch_size: int = 1,
        layers_per_stage: int | None = None,
        round_virtual_stages_to_pp_multiple: str | None = None,
        module_fqns_per_model_part: Sequence[Sequence[str]] | None = None,
        layout: str | Sequence[Sequence[str]] | None = None,
        balance: Literal["even", "cost"] = "even",
        microbatch_group_size: int | None = None,
        patch_inner_model: bool = True,
        patch_causal_lm_model: bool = True,
        patch_stage_backward_maybe_with_nosync: bool = False,
        defer_fsdp_grad_sync: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        scale_grads_in_schedule: bool = False,
        pp_seq_len: int | None = None,
        runtime: Literal["torch", "eager"] = "torch",
        overlap_p2p_comm: bool = False,
        num_microbatches_with_partial_activation_checkpoints: int | None = None,
    ):
        """Checks everything that needs no model; raises ConfigError.

        world_mesh: the mesh with the axis `pp_axis_name` between stages. `dp_axis_names` and `cp_axis_name` are the
            axes over which gradients of parameters that no FSDP shards are summed after each step; they, the other
            axis names and `moe_mesh` are handed to `parallelize_fn` too. "dp" stands for (dp_replicate, dp_shard) on a
            mesh that has these.
        pp_schedule, pp_schedule_csv: a schedule's name, or a program in torch's compute-only CSV format, which wins.
        pp_microbatch_size, pp_batch_size: rows of a microbatch, and of one step on one data-parallel rank; their
            quotient is the number of microbatches that `build` checks against the schedule and that `info.schedule` is
            made for. A step may bring another number: it is checked when it comes.
        layers_per_stage, round_virtual_stages_to_pp_multiple, module_fqns_per_model_part, layout, balance,
            microbatch_group_size, runtime, overlap_p2p_comm, num_microbatches_with_partial_activation_checkpoints:
            see `PipelineConfig`.
        patch_inner_model, patch_causal_lm_model: stand-ins in the decoder list, and outside of it. Only True exists.
        patch_stage_backward_maybe_with_nosync: let modules that FSDP wraps inside a part which it does not wrap
            (experts on their own mesh) reduce once per step as well.
        defer_fsdp_grad_sync: reduce FSDP gradients once per step; False reduces after every backward.
        device: of the stages; default the current accelerator, else the CPU.
        dtype: of the tensors between stages; default what the parts compute in.
        scale_grads_in_schedule: only False: losses are divided by the global weight already.
        pp_seq_len: tokens per row that the first buffers are described for; every step describes its own microbatches.
        """
        self._axes = Axes(
            world_mesh.root if isinstance(world_mesh, Mesh) else world_mesh,
            moe_mesh,
            pp_axis_name,
            tuple(dp_axis_names),
            cp_axis_name,
            tp_axis_name,
            ep_axis_name,
            None if ep_shard_axis_names is None else tuple(ep_shard_axis_names),
        )
        self._choice = Choice(
            pp_schedule,
            pp_schedule_csv,
            layers_per_stage,
            round_virtual_stages_to_pp_multiple,
            layout,
            module_fqns_per_model_part,
            balance,
            microbatch_group_size,
        )
        self._runtime_choice = RuntimeChoice(
            runtime, overlap_p2p_comm, num_microbatches_with_partial_activation_checkpoints
        )
        self._runtime_choice.check(pp_schedule, pp_schedule_csv)
        check_sizes(pp_microbatch_size, pp_batch_size, pp_seq_len)
        self._microbatch_size, self._num_microbatches = pp_microbatch_size, pp_batch_size // pp_microbatch_size
        self._seq_len = pp_seq_len
        check_switches(patch_inner_model, patch_causal_lm_model, scale_grads_in_schedule)
        self._defer_nested, self._defer_sync = patch_stage_backward_maybe_with_nosync, defer_fsdp_grad_sync
        self.device = torch.device(device) if device is not None else default_device()
        self._dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._plan: StagePlan | None = None
        self._eager: EagerConnections | None = None
        self._loss_fn: LossFn | None = None
        self._runtimes: dict[tuple[int, bool], AnyRuntime] = {}
        self._info = PipelineInfo(False, None, False, False, None, None)

    # Building

    def build(
        self,
        model: ModelPart | PreTrainedModel,
        loss_fn: LossFn | None = None,
        parallelize_fn: Callable[..., nn.Module | None] | None = None,
    ) -> AutoPipeline:
        """Cut `model` (left as it is; best on the meta device) and set up this rank's stages. Collective over the
        pipeline.

        `loss_fn(logprobs_BT, batch)` is what `forward_backward` uses when it is given none. `parallelize_fn(part,
        world_mesh=, moe_mesh=, dp_axis_names=, ...)` is applied to each local part, in place. Raises ConfigError: a
        wrong model or loss, a model whose split is not exact (with the layer that differs), stages that do not fit
        ranks or schedule, wrappers that would lose gradients.
        """
        part = _as_part(model)
        if loss_fn is not None and not callable(loss_fn):
            raise ConfigError(f"loss_fn must be callable as loss_fn(logprobs_BT, batch), not {type(loss_fn).__name__}")
        if self._axes.group.size() == 1:
            raise ConfigError(
                f"mesh axis {self._axes.pp_axis_name!r} has 1 rank: there is nothing to cut",
                keys=("pp_size",),
                fix="pipeline=none, or mesh.pp_size=2",
            )
        anatomy = check_split(part.model)
        plan = plan_stages(self._choice, part, anatomy, self._axes.group.size())
        self._program(plan, self._num_microbatches)  # refused here rather than at the first step
        rank = self._axes.group.rank()
        parts: list[nn.Module] = []
        for s in plan.of_rank(rank):
            cut = cut_stage(part, anatomy, layers=plan.layers[s], is_first=s == 0, is_last=s == plan.num_stages - 1)
            parts.append(self._parallelize(cut, parallelize_fn, plan))
        self._plan, self._loss_fn, self._runtimes = plan, loss_fn, {}
        stages = self._make_stages(part, parts, plan)
        self._eager = EagerConnections(stages, self._runtime_choice) if self._runtime_choice.name == "eager" else None
        first, last = plan.owner[0] == rank, plan.owner[-1] == rank
        self._info = PipelineInfo(True, None, first, last, parts, stages)
        self._info.schedule = self._runtime(self._num_microbatches, train=True)
        self._info.schedule.warm_up()
        if self._seq_len is not None:
            self._describe(self._seq_len)
        return self

    def _parallelize(
        self, part: StagePart, parallelize_fn: Callable[..., nn.Module | None] | None, plan: StagePlan
    ) -> nn.Module:
        if not any(p.is_meta for p in part.parameters()):
            part.to(self.device)
        result = parallelize_fn and parallelize_fn(part, **self._axes.keywords())
        if isinstance(result, DistributedDataParallel):
            raise ConfigError(
                "parallelize_fn returned a DDP wrapper, whose reducer does not know when the last backward is over",
                keys=("parallelizer",),
                fix="leave the part unwrapped: AutoPipeline sums plain gradients over dp_axis_names once per step",
            )
        assert result is None or result is part, "parallelize_fn must work in place"
        resharding = any(torch_compat.reshards_after_forward(m) for m in part.modules() if isinstance(m, FSDPModule))
        nested_sync = (
            not isinstance(part, FSDPModule) and bool(torch_compat.fsdp_roots(part)) and not self._defer_nested
        )
        if plan.splits_backward and (not self._defer_sync or nested_sync):
            raise ConfigError(
                f"{self._choice.pp_schedule} splits the backward: FSDP must reduce after a step's last weight gradient",
                keys=("defer_fsdp_grad_sync",),
                fix="patch_stage_backward_maybe_with_nosync=true"
                if nested_sync
                else "parallelizer.defer_fsdp_grad_sync=true",
            )
        if self._choice.schedule is not None:
            check_composition(self._choice.schedule, reshard_after_forward=resharding)
        elif plan.splits_backward and resharding:
            raise ConfigError(
                "a CSV with I and W actions needs reshard_after_forward=false",
                fix="parallelizer.reshard_after_forward=false",
            )
        return part

    def _make_stages(self, whole: ModelPart, parts: list[nn.Module], plan: StagePlan) -> list[Stage]:
        hidden_size = getattr(whole.model.config.get_text_config(), "hidden_size", None)
        if hidden_size is None:
            raise ConfigError(
                f"the config of {type(whole.model).__name__} has no hidden_size, so the width between stages is unknown"
            )
        compute_dtype = self._agreed_dtype(whole, parts)
        if self._dtype not in (None, compute_dtype):
            logger.warning(
                "stages compute in %s but send %s: activations and gradients are rounded at every boundary",
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
                hidden_size=hidden_size,
                boundary_dtype=self._dtype or compute_dtype,
                compute_dtype=compute_dtype,
                defer_nested_sync=self._defer_nested,
            )
            for index, part in zip(plan.of_rank(self._axes.group.rank()), parts, strict=True)
        ]

    def _agreed_dtype(self, whole: ModelPart, parts: Sequence[nn.Module]) -> torch.dtype:
        """What the residual stream is computed in, as the rank of the first stage knows it: an empty stage has nothing
        to tell."""
        first = next(whole.parameters(), None)
        own = next(
            (d for part in parts if (d := torch_compat.fsdp_dtype(part))),
            first.dtype if first is not None else torch.bfloat16,
        )
        agreed = [own]
        dist.broadcast_object_list(
            agreed, src=dist.get_global_rank(self._axes.group, 0), group=self._axes.group, device=self.device
        )
        return agreed[0]

    # Running: the `Stages` protocol

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of this rank, in pipeline order."""
        return self._built().model_parts or []

    def forward_backward(self, batches: Sequence[Batch], loss: LossFn | None = None) -> Tensor:
        """See `Stages.forward_backward`. Microbatches may have different lengths, and other ones in the next step."""
        info, loss = self._built(), loss or self._loss_fn
        if loss is None:
            raise ConfigError("no loss: build(model, loss_fn) or forward_backward(batches, loss)")
        runtime = self._runtime(len(batches), train=True)
        plain, tied = self._plain_parameters(), self._tied_copies()
        with contributions.only_this_step([*plain, *tied]):
            results = self._run(runtime, batches, loss)
            contributions.sum_over_groups(plain, self._axes.sum_groups())
            if tied:
                contributions.sum_tied(tied, self._tied_peer(), self._axes.group)
        total = torch.zeros((), device=self.device)
        return torch.stack([results[i].detach() for i in range(len(batches))]).sum() if info.has_last_stage else total

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], reduce: LossFn) -> list[Tensor]:
        """See `Stages.forward`: reduced where the last stage is, then sent to every rank of the pipeline. Gradients
        stay untouched."""
        self._built()
        with self._evaluation_mode():
            results = self._run(self._runtime(len(batches), train=False), batches, reduce)
        return self._share([results[i] for i in sorted(results)])

    def _run(self, runtime: AnyRuntime, batches: Sequence[Batch], on_last: LossFn) -> dict[int, Tensor]:
        keywords = [{"labels": batch.labels_BT, **batch.model_inputs()} for batch in batches]
        shapes = [self._boundary_shape(*batch.shape) for batch in batches]
        return runtime.run(shapes, keywords, lambda logprobs_BT, index: on_last(logprobs_BT, batches[index]))

    def _runtime(self, num_microbatches: int, train: bool) -> AnyRuntime:
        """The runtime for this many microbatches; made once."""
        info, plan, key = self._built(), self._plan, (num_microbatches, train)
        assert plan is not None and info.stages is not None
        if key not in self._runtimes:
            every = not self._defer_sync
            program = self._program(plan, num_microbatches) if train else plan.forward_program(num_microbatches)
            if self._eager is not None:
                group = self._group_size(plan, num_microbatches) if train else None
                self._runtimes[key] = EagerRuntime(
                    info.stages,
                    program,
                    self._eager,
                    train=train,
                    group_size=group,
                    reduce_every_microbatch=every,
                )
            else:
                self._runtimes[key] = Runtime(info.stages, program, train=train, reduce_every_microbatch=every)
        return self._runtimes[key]

    def _group_size(self, plan: StagePlan, num_microbatches: int) -> int | None:
        choice = self._choice
        return self._runtime_choice.group_size(
            choice.pp_schedule, plan.pp_size, num_microbatches, choice.microbatch_group_size
        )

    def _program(self, plan: StagePlan, num_microbatches: int) -> Program:
        self._group_size(plan, num_microbatches)  # has a rule of its own
        return plan.program(num_microbatches)

    def _share(self, values: list[Tensor]) -> list[Tensor]:
        """The last stage's tensors on every rank of the pipeline, shapes and dtypes first."""
        assert self._plan is not None
        source = dist.get_global_rank(self._axes.group, self._plan.owner[-1])
        described: list[Any] = [[(tuple(v.shape), v.dtype) for v in values]]
        dist.broadcast_object_list(described, src=source, group=self._axes.group, device=self.device)
        if not self._info.has_last_stage:
            values = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in described[0]]
        for value in values:
            dist.broadcast(value, src=source, group=self._axes.group)
        return values

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

    # Gradients that no wrapper sums

    def _plain_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters that no FSDP shards; every data-parallel rank has them whole."""
        if not self._axes.sum_groups():
            return []
        return [p for part in self.parts for p in part.parameters() if p.requires_grad and not isinstance(p, DTensor)]

    def _tied_copies(self) -> list[nn.Parameter]:
        """This rank's copies of a table that embeds on the first stage and projects on the last."""
        copies: list[nn.Parameter] = []
        for part in self.parts:
            assert isinstance(part, StagePart)
            copies += [p for name, p in part.named_parameters() if name in part.shared and p.requires_grad]
        return copies

    def _tied_peer(self) -> int | None:
        assert self._plan is not None
        ends = {self._plan.owner[0], self._plan.owner[-1]} - {self._axes.group.rank()}
        return ends.pop() if ends else None

    # Mesh and state

    @property
    def info(self) -> PipelineInfo:
        """What this rank runs; `enabled` is False before `build`."""
        return self._info

    def _built(self) -> PipelineInfo:
        if self._info.stages is None:
            raise RuntimeError("AutoPipeline is not built yet: call build(model) first")
        return self._info

    def update_seq_len(self, seq_len: int) -> None:
        """Describe the buffers for rows of `seq_len` tokens. Nothing happens when it is the current length."""
        self._built()
        if seq_len < 1:
            raise ConfigError(f"seq_len={seq_len} must be at least 1", keys=("pp_seq_len",), fix="pp_seq_len=2048")
        if seq_len != self._seq_len:
            self._seq_len = seq_len
            self._describe(seq_len)

    def _describe(self, seq_len: int) -> None:
        for stage in self._built().stages or []:
            shape = self._boundary_shape(self._microbatch_size, seq_len)
            stage.begin([shape] * self._num_microbatches, train=True)

    def _boundary_shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Of the hidden states between stages, the same for all of them."""
        part = self.parts[0]
        assert isinstance(part, StagePart)
        return part.boundary_shape(rows, tokens)

    # Listings

    def list_stage_modules(self) -> list[list[str]]:
        """Names of the modules with parameters, per local stage."""
        return listing.stage_modules(self._info.model_parts)

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """Parameters per local stage."""
        return listing.param_counts(self._info.model_parts, trainable_only)

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """Parameters of all local stages."""
        return sum(self.get_stage_param_counts(trainable_only))

    def pretty_print_stages(self, max_modules_per_stage: int = 16, trainable_only: bool = False) -> str:
        """A text block: global stage index, parameters and modules of each local stage."""
        return listing.pretty_stages(self._info, max_modules_per_stage, trainable_only)

    def debug_summary(self) -> str:
        """Schedule, stages and sizes of this rank in a few lines."""
        return listing.summary(self._info, self._plan, self._num_microbatches)

    def log_debug_summary(self) -> None:
        """`debug_summary` through logging."""
        logger.info("%s", self.debug_summary())

    def visualize_current_schedule(self, filename: str | Path | None = None) -> str:
        """Draw the running schedule with its number of microbatches and equal stage costs.

        Writes an SVG or PNG file; returns its path, or the drawing as text when no name is given.
        """
        schedule = self._built().schedule
        assert schedule is not None
        return listing.draw_program(schedule.program, None if filename is None else Path(filename))


def _as_part(model: Any) -> ModelPart:
    from transformers import PreTrainedModel

    if isinstance(model, ModelPart):
        return model
    if isinstance(model, PreTrainedModel):
        from automodel_cli.models.head import detect_head

        return ModelPart(model, detect_head(model.config))
    raise ConfigError(
        f"build(model) takes a ModelPart or a Hugging Face model, not {type(model).__name__}", keys=("model",)
    )
