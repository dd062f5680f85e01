"""What the eager schedules share: one forward, one backward, the no_sync context, and the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from automodel_cli.pipelining.megatron_core.arithmetic import check_first_val_step, checkpoint_activations_microbatch
from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, NoSyncFunc, get_model_config
from automodel_cli.pipelining.megatron_core.tensors import backward_step, forward_step_calc_loss

ForwardStepFunc = Callable[..., tuple[Any, Callable[..., Any] | None]]
"""(iterator, model[, recompute]) -> (output, loss_func); the third argument comes with partial checkpointing only."""


def as_list(value: Any) -> list[Any]:
    """A list as it is, one thing as a list of it."""
    return value if isinstance(value, list) else [value]


class GradientSync:
    """The no_sync context of a step: entered by `disable`, left by `enable`; both may be called in either state."""

    def __init__(self, no_sync_func: NoSyncFunc | Sequence[NoSyncFunc] | None):
        functions: Sequence[Any] = no_sync_func if isinstance(no_sync_func, Sequence) else [no_sync_func]
        self._functions = [f for f in functions if f is not None]
        self._contexts: ExitStack | None = None

    def disable(self) -> None:
        """Backwards from here on accumulate without reducing."""
        if self._contexts is None:
            self._contexts = ExitStack()
            for function in self._functions:
                self._contexts.enter_context(function())

    def enable(self) -> None:
        """The next backward reduces."""
        if self._contexts is not None:
            self._contexts.close()
            self._contexts = None


class StepRunner:
    """One step of one rank: runs forwards and backwards of its chunks and collects what they return."""

    def __init__(
        self,
        forward_step_func: ForwardStepFunc,
        data_iterators: Sequence[Iterator[Any] | None],
        models: Sequence[Any],
        num_microbatches: int,
        *,
        forward_only: bool,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
    ):
        self.models = list(models)
        self.config: ModelParallelConfig = get_model_config(models[0])
        self.sync = GradientSync(self.config.no_sync_func)
        self.num_microbatches, self.forward_only = num_microbatches, forward_only
        self.stored: list[Any] = []
        self._forward_step_func, self._iterators = forward_step_func, data_iterators
        self._collect, self._first_val_step = collect_non_loss_data, first_val_step
        self._num_tokens: Tensor | int = 0

    def recompute(self, virtual_microbatch: int, num_warmup: int) -> bool | None:
        """Whether this forward recomputes its activations; None without partial checkpointing."""
        partial = self.config.num_microbatches_with_partial_activation_checkpoints
        return checkpoint_activations_microbatch(virtual_microbatch, num_warmup, partial)

    def forward(
        self, chunk: int, microbatch: int, input_tensor: Any, *, is_last_stage: bool, recompute: bool | None = None
    ) -> Any:
        """The output, or the loss on the last stage; a list when the input is one."""
        model = self.models[chunk]
        if check_first_val_step(self._first_val_step, self.forward_only, microbatch == 0):
            # Optional, as in Megatron-core: only models that cache weights between microbatches have it.
            getattr(model, "set_is_first_microbatch", _nothing)()
        model.set_input_tensor(as_list(input_tensor))
        flags = () if recompute is None else (recompute,)
        output, loss_func = self._forward_step_func(self._iterators[chunk], model, *flags)
        step = forward_step_calc_loss(
            output,
            loss_func,
            num_microbatches=self.num_microbatches,
            is_last_stage=is_last_stage,
            context_parallel_size=self.config.context_parallel_size,
            calculate_per_token_loss=self.config.calculate_per_token_loss,
            collect_non_loss_data=self._collect,
        )
        self.stored += step.stored
        self._num_tokens = self._num_tokens + step.num_tokens
        return as_list(step.output) if isinstance(input_tensor, list) else step.output

    def backward(self, input_tensor: Any, output: Any, output_grad: Any, *, is_last_stage: bool) -> Any:
        """Gradient of the input; None on the first stage. A list when the input is one.

        Zeros where the output does not depend on the input (a microbatch without labels): the previous rank waits for
        something.
        """
        grads = backward_step(
            input_tensor,
            output,
            output_grad,
            grad_scale_func=self.config.grad_scale_func if is_last_stage else None,
            # A loss was not sent, so it was not released either.
            deallocate_pipeline_outputs=self.config.deallocate_pipeline_outputs and not is_last_stage,
        )
        filled = [
            torch.zeros_like(tensor) if grad is None and tensor is not None else grad
            for tensor, grad in zip(as_list(input_tensor), as_list(grads), strict=True)
        ]
        return filled if isinstance(input_tensor, list) else filled[0]

    def finish(self) -> list[Any]:
        """After the last backward: finalise gradients. Returns what the microbatches stored."""
        finalize = self.config.finalize_model_grads_func
        if finalize is not None and not self.forward_only:
            finalize(self.models, self._tokens() if self.config.calculate_per_token_loss else None)
        return self.stored

    def _tokens(self) -> Tensor:
        return torch.as_tensor(self._num_tokens, dtype=torch.int64, device=self.config.device)


def _nothing() -> None:
    pass


def alone(value: Any, name: str) -> Any:
    """The one element of a list of length 1, or the value. Without interleaving a rank has one chunk."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} has {len(value)} entries; without interleaving a rank has one chunk")
    return value[0]
