"""Code that the schedules share: forward, backward, no_sync context, and the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from automodel_cli.pipelining.megatron_core.arithmetic import (
    check_first_val_step,
    checkpoint_activations_microbatch,
    get_tensor_shapes,
)
from automodel_cli.pipelining.megatron_core.config import (
    ModelParallelConfig,
    NoSyncFunc,
    PipelineModel,
    ProcessGroupCollection,
    Tensors,
    get_model_config,
    unwrapped,
)
from automodel_cli.pipelining.megatron_core.embedding import (
    OutputModel,
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from automodel_cli.pipelining.megatron_core.p2p import P2PCommunicator
from automodel_cli.pipelining.megatron_core.tensors import as_list, backward_step, forward_step_calc_loss

T = TypeVar("T")
DataIterator = Iterator[object] | None
ForwardStepFunc = Callable[..., tuple[Tensor, Callable[..., object] | None]]
"""(iterator, model[, recompute]) -> (output, loss_func).

The third argument is passed with partial checkpointing only.
"""


def make_communicator(groups: ProcessGroupCollection | None, config: ModelParallelConfig) -> P2PCommunicator:
    """Return the communicator of `groups.pp`. Raises ValueError without one."""
    if groups is None or groups.pp is None:
        raise ValueError("a pipeline needs p2p_communicator, or pg_collection with pp")
    return P2PCommunicator(groups.pp, config)


def shapes_between_stages(
    config: ModelParallelConfig, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors between stages (`arithmetic.get_tensor_shapes`) for the sizes of `config`."""
    return get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=config.hidden_size,
        decoder_seq_length=decoder_seq_length,
        sequence_parallel=config.sequence_parallel,
        tensor_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        variable_seq_lengths=config.variable_seq_lengths,
    )


def set_current_microbatch(model: PipelineModel, microbatch_id: int) -> None:
    """Set `current_microbatch` on each layer of `model.decoder`, and on the transformer layers of `model.mtp`.

    A model without a decoder is not changed.
    """
    model = unwrapped(model)
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        return
    for layer in decoder.layers:
        layer.current_microbatch = microbatch_id
    mtp = getattr(model, "mtp", None)
    for layer in () if mtp is None else mtp.layers:
        layer.transformer_layer.current_microbatch = microbatch_id


def forward_step(
    forward_step_func: ForwardStepFunc,
    data_iterator: DataIterator,
    model: PipelineModel,
    num_microbatches: int,
    input_tensor: Tensors,
    forward_data_store: list[object],
    config: ModelParallelConfig,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Tensors, Tensor | int]:
    """Run the forward of one microbatch on one model chunk. Megatron-core's `forward_step`.

    Args:
        forward_step_func: `(iterator, model[, recompute])` -> `(output, loss_func)`. On the last stage,
            `loss_func(output)` returns `(loss, data)`, which is divided by the number of microbatches, or `(loss,
            num_tokens, data)`, which is also divided by its tokens. With `collect_non_loss_data` it is called as
            `loss_func(output, non_loss_data=True)` and may return anything.
        input_tensor: the tensor of the previous stage, or a list. None on the first stage.
        forward_data_store: `data` of a last stage is appended to it.
        checkpoint_activations_microbatch: third argument of `forward_step_func`. None passes none.
        current_microbatch: see `set_current_microbatch`.
        vp_stage: expected chunk, checked if `model` has a `vp_stage`.

    Returns:
        The output, or the scaled loss on the last stage, as a list if `input_tensor` is one. The number of tokens, 0 if
        unknown.

    Raises:
        ValueError: `vp_stage` differs from that of the model.
    """
    own_stage = getattr(model, "vp_stage", None)
    if vp_stage is not None and own_stage is not None and vp_stage != own_stage:
        raise ValueError(f"vp_stage={vp_stage}, but the model chunk has vp_stage={own_stage}")
    if is_first_microbatch:
        # Optional, as in Megatron-core: only models that cache weights between microbatches have it.
        getattr(model, "set_is_first_microbatch", _nothing)()
    if current_microbatch is not None:
        set_current_microbatch(model, current_microbatch)
    unwrapped(model).set_input_tensor(as_list(input_tensor))
    flags = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
    autocast = torch.autocast(config.device.type, config.autocast_dtype) if config.enable_autocast else nullcontext()
    with autocast:
        output, loss_func = forward_step_func(data_iterator, model, *flags)
    step = forward_step_calc_loss(
        output,
        loss_func,
        num_microbatches=num_microbatches,
        is_last_stage=is_last_stage,
        context_parallel_size=cp_group_size,
        calculate_per_token_loss=config.calculate_per_token_loss,
        collect_non_loss_data=collect_non_loss_data,
    )
    forward_data_store += step.stored
    return [step.output] if isinstance(input_tensor, list) else step.output, step.num_tokens


class GradientSync:
    """The no_sync context of a step. `disable` enters it and `enable` leaves it. Both may be called in any state."""

    def __init__(self, no_sync_func: NoSyncFunc | Sequence[NoSyncFunc] | None):
        functions = no_sync_func if isinstance(no_sync_func, Sequence) else [no_sync_func]
        self._functions = [f for f in functions if f is not None]
        self._contexts: ExitStack | None = None

    def disable(self) -> None:
        """Accumulate gradients without reduction in the next backwards."""
        if self._contexts is None:
            self._contexts = ExitStack()
            for function in self._functions:
                self._contexts.enter_context(function())

    def enable(self) -> None:
        """Reduce gradients in the next backward."""
        if self._contexts is not None:
            self._contexts.close()
            self._contexts = None


class StepRunner:
    """One step of one rank: runs forwards and backwards of its chunks and collects the results."""

    def __init__(
        self,
        forward_step_func: ForwardStepFunc,
        data_iterators: Sequence[DataIterator],
        models: Sequence[PipelineModel],
        num_microbatches: int,
        *,
        forward_only: bool,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        self.models = list(models)
        self.config = get_model_config(models[0])
        self.sync = GradientSync(self.config.no_sync_func)
        self.num_microbatches, self.forward_only = num_microbatches, forward_only
        self.stored: list[object] = []
        self._forward_step_func, self._iterators = forward_step_func, data_iterators
        self._collect, self._first_val_step = collect_non_loss_data, first_val_step
        self._num_tokens: Tensor | int = 0
        self._output_layer: OutputModel | None = None  # With the output layer with a deferred weight gradient.
        self._tp_group = None if pg_collection is None else pg_collection.tp

    def defer_embedding(self, *, is_last_stage: bool) -> None:
        """Empty the buffers of the output layer before the first forward, if its weight gradient is deferred."""
        self._output_layer = clear_embedding_activation_buffer(self.config, self.models, is_last_stage)

    def recompute(self, virtual_microbatch: int, num_warmup: int) -> bool | None:
        """Return whether this forward recomputes its activations. None without partial checkpointing."""
        partial = self.config.num_microbatches_with_partial_activation_checkpoints
        return checkpoint_activations_microbatch(virtual_microbatch, num_warmup, partial)

    def forward(
        self, chunk: int, microbatch: int, inputs: Tensors, *, is_last_stage: bool, recompute: bool | None = None
    ) -> list[Tensor | None]:
        """Return the output, or the loss on the last stage."""
        output, num_tokens = forward_step(
            self._forward_step_func,
            self._iterators[chunk],
            self.models[chunk],
            self.num_microbatches,
            as_list(inputs),
            self.stored,
            self.config,
            self.config.context_parallel_size,
            self._collect,
            recompute,
            check_first_val_step(self._first_val_step, self.forward_only, microbatch == 0),
            microbatch,
            is_last_stage=is_last_stage,
        )
        self._num_tokens = self._num_tokens + num_tokens
        return as_list(output)

    def backward(
        self, inputs: Tensors, output: Tensors, output_grad: Tensors, *, is_last_stage: bool
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs, None on the first stage.

        Zeros if the output does not depend on the input (a microbatch without labels), because the previous rank waits
        for a tensor.
        """
        inputs = as_list(inputs)
        grads = as_list(backward_step(inputs, output, output_grad, None, self.config))
        return [
            torch.zeros_like(tensor) if grad is None and tensor is not None else grad
            for tensor, grad in zip(inputs, grads, strict=True)
        ]

    def finish(self) -> list[object]:
        """Finalize the gradients after the last backward. Returns the stored data of the microbatches."""
        if self._output_layer is not None and not self.forward_only:
            finish_embedding_wgrad_compute(self.config, self._output_layer, True, self._tp_group)
        finalize = self.config.finalize_model_grads_func
        if finalize is not None and not self.forward_only:
            finalize(self.models, self._tokens() if self.config.calculate_per_token_loss else None)
        return self.stored

    def _tokens(self) -> Tensor:
        return torch.as_tensor(self._num_tokens, dtype=torch.int64, device=self.config.device)


def _nothing() -> None:
    pass


def alone(value: T | list[T], name: str) -> T:
    """Return the element of a list of length 1, or the value. Without interleaving, a rank has one chunk."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} has {len(value)} entries; without interleaving a rank has one chunk")
    return value[0]
