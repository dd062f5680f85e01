"""`AutoPipeline`, the public interface of pipeline parallelism. Its keywords build a `PipelineConfig`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining import summary
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.stage_module import Ready
from automodel_cli.pipelining.error_keys import as_keywords
from automodel_cli.pipelining.mesh_axes import Axes, check_batch_sizes
from automodel_cli.pipelining.stages import LossFn, PipelineStages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class AutoPipeline(PipelineStages):  # Public: docs/api.md
    """Split a model into stages, connect them, and run steps of microbatches.

    Example::

        pipeline = AutoPipeline(world_mesh=mesh, pp_schedule="interleaved_1f1b", pp_batch_size=8)
        pipeline.build(part, parallelize_fn=lambda part, **axes: parallelize(part, mesh, config))
        loss = pipeline.forward_backward(batches, lambda output, batch: -output.logprobs_BT.sum() / weight)

    Gradients are sums over microbatches and data-parallel ranks. Nothing is averaged or rescaled.

    Args:
        world_mesh: the mesh with the axis `pp_axis_name` between stages. `dp_axis_names` and `cp_axis_name` are the
            axes over which gradients of parameters without FSDP are summed after each step. All axis names and
            `moe_mesh` are also passed to `parallelize_fn`. "dp" means (dp_replicate, dp_shard) on a mesh with these
            axes.
        pp_schedule: name of a schedule.
        pp_schedule_csv: a program in torch's compute-only CSV format, which overrides `pp_schedule`.
        pp_microbatch_size: sequences per microbatch.
        pp_batch_size: sequences per step and data-parallel rank. Divided by `pp_microbatch_size` it is the number of
            microbatches that `build` checks, and that `info.schedule` is made for. A step may have another number,
            which is checked then.
        layers_per_stage: see `PipelineConfig`, as for `round_virtual_stages_to_pp_multiple`,
            `module_fqns_per_model_part`, `layout`, `balance` and `microbatch_group_size`.
        runtime: only the default is supported, as for `overlap_p2p_comm` and
            `num_microbatches_with_partial_activation_checkpoints`. The functions of `pipelining.megatron_core` have
            these options.
        patch_inner_model: make stages of the base model with stand-ins for layers of other stages. False: its forward
            takes and returns hidden states itself (`cut.stage_module.Ready`), which `build` checks on a small copy.
        patch_causal_lm_model: the same for the causal LM around the base model.
        patch_stage_backward_maybe_with_nosync: also reduce gradients of FSDP modules inside a part without FSDP
            (experts on their own mesh) once per step.
        defer_fsdp_grad_sync: reduce FSDP gradients once per step. False reduces after every backward.
        device: device of the stages. Defaults to the current accelerator, else the CPU.
        dtype: dtype of the tensors between stages. Defaults to the compute dtype of the parts.
        scale_grads_in_schedule: divide the gradients of a step by its number of microbatches, for losses that are means
            over their microbatch. The returned loss stays the sum. Losses that are divided by the global weight need
            False.
        pp_seq_len: tokens per sequence of the first buffers. Every step describes its own microbatches.
    """

    def __init__(
        self,
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
        patch_inner_model: bool = True,
        patch_causal_lm_model: bool = True,
        patch_stage_backward_maybe_with_nosync: bool = False,
        defer_fsdp_grad_sync: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        scale_grads_in_schedule: bool = False,
        *,
        layout: str | Sequence[Sequence[str]] | None = None,
        balance: Literal["even", "cost"] = "even",
        microbatch_group_size: int | None = None,
        pp_seq_len: int | None = None,
        runtime: Literal["torch", "eager"] = "torch",
        overlap_p2p_comm: bool = False,
        num_microbatches_with_partial_activation_checkpoints: int | None = None,
    ):
        """Check all options that need no model. Raises ConfigError."""
        with as_keywords():
            check_batch_sizes(pp_microbatch_size, pp_batch_size, pp_seq_len)
            others = cp_axis_name, tp_axis_name, ep_axis_name, ep_shard_axis_names
            axes = _axes(world_mesh, moe_mesh, pp_axis_name, dp_axis_names, *others)
            config = PipelineConfig(
                schedule=pp_schedule, schedule_csv=pp_schedule_csv, balance=balance,
                microbatch_group_size=microbatch_group_size, layers_per_stage=layers_per_stage,
                round_virtual_stages_to_pp_multiple=round_virtual_stages_to_pp_multiple,  # type: ignore[arg-type]
                layout=layout if layout is None or isinstance(layout, str) else _lists(layout),
                module_fqns_per_model_part=_lists(module_fqns_per_model_part),
                dtype=_dtype_name(dtype),  # type: ignore[arg-type]
            )  # fmt: skip
            _check_runtime(runtime, overlap_p2p_comm, num_microbatches_with_partial_activation_checkpoints)
            config.read_program()  # An invalid file is rejected here and not in `build`.
        super().__init__(
            config,
            axes,
            num_microbatches=pp_batch_size // pp_microbatch_size,
            device=None if device is None else torch.device(device),
            defer_sync=defer_fsdp_grad_sync,
            defer_nested=patch_stage_backward_maybe_with_nosync,
            spelling=as_keywords,
            ready=Ready(inner=not patch_inner_model, outer=not patch_causal_lm_model),
        )
        self._microbatch_size, self._seq_len = pp_microbatch_size, pp_seq_len
        self._scales_grads = scale_grads_in_schedule

    @property
    def pp_mesh(self) -> DeviceMesh:
        """The mesh axis between stages."""
        return self._axes.pp_mesh

    def build(
        self,
        model: ModelPart | PreTrainedModel,
        loss_fn: LossFn | None = None,
        parallelize_fn: Callable[..., nn.Module | None] | None = None,
    ) -> Self:
        """See `PipelineStages.build`. If `pp_seq_len` is set, buffers are described for sequences of so many tokens."""
        super().build(model, loss_fn, parallelize_fn)
        if self._seq_len is not None:
            self._describe(self._seq_len)
        return self

    def forward_backward(
        self, batches: Sequence[Batch], loss: LossFn | None = None, request: HeadRequest = LOGPROBS
    ) -> Tensor:
        """See `PipelineStages.forward_backward`. `scale_grads_in_schedule` divides the gradients by `len(batches)`."""
        loss = loss or self._loss_fn
        if loss is not None and self._scales_grads:
            loss = _with_gradient_over(loss, len(batches))
        return super().forward_backward(batches, loss, request)

    def update_seq_len(self, seq_len: int) -> None:
        """Describe the buffers for sequences of `seq_len` tokens. No effect for the current length."""
        self._built()
        check_range("pp_seq_len", seq_len, at_least=1, fix="pp_seq_len=2048")
        if seq_len != self._seq_len:
            self._seq_len = seq_len
            self._describe(seq_len)

    def _describe(self, seq_len: int) -> None:
        for stage in self._built().stages or []:
            shape = self._boundary_shape(self._microbatch_size, seq_len)
            stage.begin([shape] * self._num_microbatches, train=True)

    # Summaries

    def list_stage_modules(self) -> list[list[str]]:
        """Return the names of the modules with parameters, per local stage."""
        return summary.stage_modules(self._info.model_parts)

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """Return the number of parameters per local stage."""
        return summary.param_counts(self._info.model_parts, trainable_only)

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """Return the number of parameters of all local stages."""
        return sum(self.get_stage_param_counts(trainable_only))

    def pretty_print_stages(self, max_modules_per_stage: int = 16, trainable_only: bool = False) -> str:
        """Return text with index, parameters and modules of each local stage."""
        return summary.pretty_stages(self._info, max_modules_per_stage, trainable_only)

    def debug_summary(self) -> str:
        """Return text with the schedule, stages and sizes of this rank."""
        return summary.pipeline_summary(self._info, self._local.plan if self._local else None, self._num_microbatches)

    def log_debug_summary(self) -> None:
        """Log `debug_summary`."""
        logger.info("%s", self.debug_summary())

    def visualize_current_schedule(self, filename: str | Path | None = None) -> str:
        """Draw the schedule with its number of microbatches and equal stage costs.

        Args:
            filename: path of an SVG file. None: draw as text.

        Returns the path, or the text.
        """
        schedule = self._built().schedule
        assert schedule is not None
        return summary.draw_program(schedule.program, None if filename is None else Path(filename))


def _check_runtime(runtime: str, overlap_p2p_comm: bool, num_partial: int | None) -> None:
    """Raise ConfigError for options that only the functions of `pipelining.megatron_core` have."""
    partial_key = "num_microbatches_with_partial_activation_checkpoints"
    for key, value, default in (
        ("runtime", runtime, "torch"),
        ("overlap_p2p_comm", overlap_p2p_comm, False),
        (partial_key, num_partial, None),
    ):
        if value != default:
            raise ConfigError(
                f"{key}={value!r} is not supported because AutoPipeline runs every schedule on "
                "torch.distributed.pipelining. Only the functions of pipelining.megatron_core have this option",
                code="not_supported",
                keys=(key,),
                fix=f"{key}={default!r}",
            )


def _axes(
    world: DeviceMesh | Mesh | None,
    moe: DeviceMesh | None,
    pp: str,
    dp: Sequence[str],
    cp: str | None,
    tp: str | None,
    ep: str | None,
    ep_shard: Sequence[str] | None,
) -> Axes:
    root = world.root if isinstance(world, Mesh) else world
    return Axes(root, moe, pp, tuple(dp), cp, tp, ep, None if ep_shard is None else tuple(ep_shard))


def _with_gradient_over(loss: LossFn, num_microbatches: int) -> LossFn:
    """Return a loss with the same value and its gradient divided by `num_microbatches`."""

    def scaled(output: HeadOutput, batch: Batch) -> Tensor:
        value = loss(output, batch)
        share = value / num_microbatches
        return share + (value - share).detach()

    return scaled


@overload
def _lists(names: Sequence[Sequence[str]]) -> list[list[str]]: ...
@overload
def _lists(names: None) -> None: ...
def _lists(names: Sequence[Sequence[str]] | None) -> list[list[str]] | None:
    return None if names is None else [list(of_stage) for of_stage in names]


def _dtype_name(dtype: torch.dtype | str | None) -> str | None:
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ConfigError(
            f"dtype={dtype!r} must be a dtype of torch", code="invalid_choice", keys=("dtype",), fix="dtype=bfloat16"
        )
    return name
