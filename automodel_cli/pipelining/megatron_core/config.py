"""Flags and process groups of the eager runtime, under Megatron-core's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

SyncFunc = Callable[[Any], Any]
"""Launches a collective for these parameters."""
NoSyncFunc = Callable[[], AbstractContextManager[Any]]


@dataclass
class ModelParallelConfig:
    """What the communicator and the three schedule functions read from `model.config`.

    hidden_size, sequence_parallel, *_parallel_size: with the lengths of a call, the shape between stages.
    pipeline_dtype: of the tensors between stages; receives need it. variable_seq_lengths: each tensor is preceded by a
        message with its shape. device: of receive buffers.
    batch_p2p_comm: the operations of one call are posted together; without it one by one, which is what overlapping
        needs. overlap_p2p_comm (interleaved only): receives are posted early and waited for when used.
        overlap_p2p_comm_warmup_flush: also outside of the steady phase.
    deallocate_pipeline_outputs: free an output's values once they are sent. microbatch_group_size_per_vp_stage:
    microbatches per chunk and round, interleaved only; None is the pipeline size.
    num_microbatches_with_partial_activation_checkpoints: of as many microbatches as are alive at once, this many keep
        their activations; the others are recomputed. None leaves it to the model.
    calculate_per_token_loss: losses are sums; gradients are divided by the global token count after the step.
    grad_scale_func: applied to the loss before its backward. enable_autocast, autocast_dtype: run `forward_step_func`
    under torch.autocast of this device. defer_embedding_wgrad_compute: the output layer keeps its inputs and the
    gradients of its outputs in buffers; its
        weight gradient is computed after the last backward (`embedding.finish_embedding_wgrad_compute`).
    no_sync_func: context in which backwards do not reduce gradients over data-parallel ranks (interleaved: one for all
        chunks, or a list). grad_sync_func, param_sync_func: launch reductions and gathers (interleaved: one for all
        chunks, or a list). finalize_model_grads_func(models, num_tokens): called after the last backward; `num_tokens`
        is None unless calculate_per_token_loss.
    """

    hidden_size: int
    pipeline_dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    virtual_pipeline_model_parallel_size: int | None = None
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    variable_seq_lengths: bool = False
    batch_p2p_comm: bool = True
    overlap_p2p_comm: bool = False
    overlap_p2p_comm_warmup_flush: bool = False
    deallocate_pipeline_outputs: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    calculate_per_token_loss: bool = False
    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    defer_embedding_wgrad_compute: bool = False
    no_sync_func: NoSyncFunc | Sequence[NoSyncFunc] | None = None
    grad_sync_func: SyncFunc | Sequence[SyncFunc] | None = None
    param_sync_func: SyncFunc | Sequence[SyncFunc] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.overlap_p2p_comm and self.batch_p2p_comm:
            raise ValueError("overlap_p2p_comm waits for single operations: set batch_p2p_comm=False")
        if self.overlap_p2p_comm_warmup_flush and not self.overlap_p2p_comm:
            raise ValueError("overlap_p2p_comm_warmup_flush needs overlap_p2p_comm=True")
        if self.overlap_p2p_comm and self.variable_seq_lengths:
            raise ValueError(
                "overlap_p2p_comm posts a receive before the sender knows the shape: set variable_seq_lengths=False"
            )


@dataclass(frozen=True)
class ProcessGroupCollection:
    """Groups by role; None is one rank.

    pp: between stages. dp_cp: ranks whose losses add up. embd: ranks that hold a copy of a tied table. tp: ranks of
    tensor parallelism.
    """

    pp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    embd: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None


class PipelineModel(Protocol):
    """What the schedule functions ask of a model (chunk).

    It may also have `set_is_first_microbatch()`, called before the first microbatch of a step; the functions look for
    it, as Megatron-core's do, since few models have it.
    """

    config: ModelParallelConfig

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Keep what the previous stage sent (`[None]` on the first stage) for the next forward."""
        ...

    def parameters(self) -> Any: ...


def get_model_config(model: Any) -> ModelParallelConfig:
    """The config of a model, through wrappers that keep it as `.module`."""
    config = unwrapped(model).config
    assert isinstance(config, ModelParallelConfig), f"model.config is a {type(config).__name__}"
    return config


def unwrapped(model: Any) -> Any:
    """Return what wrappers such as DDP keep as `.module`."""
    while isinstance(model, nn.Module) and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model
