"""Options and process groups of the schedule functions, under Megatron-core's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

SyncFunc = Callable[[Iterator[nn.Parameter]], object]
"""Launches a collective for these parameters."""
Tensors = Tensor | None | list[Tensor | None]
"""Between stages, or gradients of them."""
NoSyncFunc = Callable[[], AbstractContextManager[object]]


@dataclass
class ModelParallelConfig:
    """Options that the communicator and the schedule functions read from `model.config`.

    Attributes:
        hidden_size: with `sequence_parallel`, the `*_parallel_size` options and the lengths of a call, it determines
            the shape between stages.
        pipeline_dtype: dtype of the tensors between stages. Required for receives.
        variable_seq_lengths: send a message with the shape before each tensor.
        device: device of receive buffers.
        batch_p2p_comm: post the operations of one call together. False posts them one by one, which overlap needs.
        overlap_p2p_comm: post receives early and wait when they are used. Interleaved schedules only.
        overlap_p2p_comm_warmup_flush: overlap outside the steady phase too.
        deallocate_pipeline_outputs: free the values of an output after it was sent.
        microbatch_group_size_per_vp_stage: microbatches per chunk and round, interleaved only. None: the pipeline size.
        num_microbatches_with_partial_activation_checkpoints: of the microbatches that are alive at once, so many keep
            their activations, and the others are recomputed. None uses the setting of the model.
        calculate_per_token_loss: losses are sums. Gradients are divided by the global number of tokens after the step.
        grad_scale_func: applied to the loss before its backward.
        enable_autocast: run `forward_step_func` under torch.autocast with `autocast_dtype` on this device.
        defer_embedding_wgrad_compute: the output layer stores its inputs and output gradients. Its weight gradient is
            computed after the last backward (`embedding.finish_embedding_wgrad_compute`).
        no_sync_func: context in which backwards do not reduce gradients over data-parallel ranks. Interleaved schedules
            take one for all chunks, or a list. The same holds for `grad_sync_func` and `param_sync_func`.
        grad_sync_func: launches gradient reductions.
        param_sync_func: launches parameter gathers.
        finalize_model_grads_func: called as `(models, num_tokens)` after the last backward. `num_tokens` is None unless
            `calculate_per_token_loss`.
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
    no_sync_func: NoSyncFunc | list[NoSyncFunc] | None = None
    grad_sync_func: SyncFunc | list[SyncFunc] | None = None
    param_sync_func: SyncFunc | list[SyncFunc] | None = None
    finalize_model_grads_func: Callable[..., object] | None = None

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
    """Process groups by role. None means one rank.

    Attributes:
        pp: between stages.
        dp_cp: ranks whose losses are summed.
        embd: ranks with a copy of a tied embedding table.
        tp: ranks of tensor parallelism.
    """

    pp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    embd: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None


class PipelineModel(Protocol):
    """Interface of a model (chunk).

    A model may also have `set_is_first_microbatch()`, which is called before the first microbatch of a step. It is
    optional, as in Megatron-core, because few models have it.
    """

    config: ModelParallelConfig

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Store the tensors of the previous stage (`[None]` on the first stage) for the next forward."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def get_model_config(model: object) -> ModelParallelConfig:
    """Return the config of a model, also inside wrappers with a `.module`."""
    config = unwrapped(model).config
    assert isinstance(config, ModelParallelConfig), f"model.config is a {type(config).__name__}"
    return config


def unwrapped(model: object) -> PipelineModel:
    """Return the model inside wrappers with a `.module`, such as DDP."""
    while isinstance(model, nn.Module) and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return cast(PipelineModel, model)
