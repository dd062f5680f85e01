"""Tensor helpers of Megatron-core: release of sent outputs, backward without them, loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, Tensors

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_single_shape(shape: object) -> TypeIs[Sequence[int]]:
    """Return whether `shape` is a single shape: a torch.Size (even empty), or a non-empty list or tuple of ints."""
    match shape:
        case torch.Size() | [int(), *_]:
            return True
    return False


def as_list(value: Tensors) -> list[Tensor | None]:
    """Return a list unchanged, and a tensor or None as a list with one element."""
    return value if isinstance(value, list) else [value]


def deallocate_output_tensor(out: object, deallocate_pipeline_outputs: bool | None = False) -> None:
    """Free the values of a sent output and keep its graph: `.data` becomes one element, `grad_fn` stays.

    No effect for None or without the flag. Lists and dicts are traversed. Rejects views, whose base would keep the
    memory, and objects that are not tensors. Only `custom_backward` can start from the result.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    match out:
        case dict():
            deallocate_output_tensor(list(out.values()), deallocate_pipeline_outputs)
            return
        case list() | tuple():
            for tensor in out:
                deallocate_output_tensor(tensor, deallocate_pipeline_outputs)
            return
    assert isinstance(out, Tensor), f"expected a tensor, got {type(out).__name__}"
    assert out._base is None, f"a view of {tuple(out._base.shape)} cannot be deallocated: its base keeps the memory"
    # The next stage has the values, and this stage's backward needs `grad_fn` only. With 8 microbatches in flight this
    # frees 8 outputs.
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Run backward from a deallocated output, without the shape check of `autograd.backward`.

    Gradients are bitwise equal to autograd's.

    Args:
        output: a tensor with one element, deallocated or a loss.
        grad_output: None means ones.
    """
    assert output.numel() == 1, f"output has {output.numel()} elements; deallocate_output_tensor must have run"
    if grad_output is None:
        grad_output = torch.ones_like(output, memory_format=torch.preserve_format)
    # The only entry of the engine that does not compare shapes. autograd.backward would reject the one-element output.
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad_output,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@dataclass
class StepLoss:
    """Result of a forward step: loss or output to send, number of tokens, and collected data."""

    output: Tensor
    num_tokens: Tensor | int = 0
    stored: list[object] = field(default_factory=list)


def forward_step_calc_loss(
    output_tensor: Tensor,
    loss_func: Callable[..., object] | None,
    *,
    num_microbatches: int,
    is_last_stage: bool,
    context_parallel_size: int = 1,
    calculate_per_token_loss: bool = False,
    collect_non_loss_data: bool = False,
) -> StepLoss:
    """Return the loss of one microbatch on the last stage, scaled by the number of values that `loss_func` returns.

    - `(loss, data)`: `loss * cp / m`, also with `calculate_per_token_loss`. Return three values for a true token mean.
    - `(loss, num_tokens, data)`: `loss / max(num_tokens, 1) / m`. Unchanged with `calculate_per_token_loss`, which
      scales gradients once by the global number of tokens after the step.
    - No `loss_func`, or `collect_non_loss_data`: the output, unchanged.

    On other stages the output is not changed.
    """
    if not is_last_stage:
        return StepLoss(output_tensor)
    if loss_func is None:
        return StepLoss(output_tensor, stored=[output_tensor])
    if collect_non_loss_data:
        return StepLoss(output_tensor, stored=[loss_func(output_tensor, non_loss_data=True)])
    result = loss_func(output_tensor)
    assert isinstance(result, tuple) and len(result) in (2, 3), f"loss_func must return 2 or 3 values, not {result!r}"
    if len(result) == 2:
        loss, data = result
        return StepLoss(loss * context_parallel_size / num_microbatches, stored=[data])
    loss, num_tokens, data = result
    if not calculate_per_token_loss:
        count = torch.as_tensor(num_tokens, device=loss.device)
        # A mean per microbatch, then a mean over microbatches: Megatron-core's default, which weights tokens of short
        # microbatches more. `calculate_per_token_loss` divides once by all tokens.
        loss = loss / count.clamp(min=1) / num_microbatches
    return StepLoss(loss, num_tokens, [data])


def aux_loss_scales(
    *,
    num_microbatches: int,
    context_parallel_size: int = 1,
    calculate_per_token_loss: bool = False,
    grad_scale_func: Callable[[Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Return the scales of MoE auxiliary losses, `scale * cp / m`, and of MTP losses, `scale / m`.

    With per-token losses both are `scale`. Raises ValueError if `grad_scale_func` returns more than one element.
    """
    scale = torch.ones(1, device=device)
    if grad_scale_func is not None:
        scale = grad_scale_func(scale)
    if scale.numel() != 1:
        raise ValueError(f"grad_scale_func must return one element, not {scale.numel()}")
    if calculate_per_token_loss:
        return scale, scale
    return scale * context_parallel_size / num_microbatches, scale / num_microbatches


def backward_step(
    input_tensor: Tensors,
    output_tensor: Tensors,
    output_tensor_grad: Tensors,
    model_type: object,
    config: ModelParallelConfig,
) -> Tensors:
    """Run the backward of one stage and microbatch. Return the gradient of its input, as a list if the input is one.

    On the last stage, `output_tensor_grad` is None and `config.grad_scale_func` scales the loss. Nothing runs if the
    output needs no gradient. On the first stage, the input and its gradient are None. `model_type` is part of
    Megatron-core's signature and not used.
    """
    inputs = as_list(input_tensor)
    for tensor in inputs:
        if tensor is not None:
            # Inputs are no leaves if they were cast or sliced. Autograd would drop their gradient, which is sent to the
            # previous rank.
            tensor.retain_grad()
    output, grad = as_list(output_tensor)[0], as_list(output_tensor_grad)[0]
    assert output is not None, "a stage has an output"
    if grad is None and config.grad_scale_func is not None:
        output = config.grad_scale_func(output)
    if output.requires_grad:
        if config.deallocate_pipeline_outputs:
            custom_backward(output, grad)
        else:
            torch.autograd.backward(output, grad_tensors=grad)
    input_grads = [None if tensor is None else tensor.grad for tensor in inputs]
    return input_grads if isinstance(input_tensor, list) else input_grads[0]
