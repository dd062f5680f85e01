"""The deferred weight gradient of an output layer, with Megatron-core's functions.

The output layer computes no weight gradient in its backward. It keeps its inputs and the gradients of its outputs, and
the GEMMs run after the last backward, when the pipeline drains anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, unwrapped


def clear_embedding_activation_buffer(config: ModelParallelConfig, model: Any, is_last_stage: bool) -> Any:
    """Empty the buffers of the chunk with the output layer, and return it. None where nothing is deferred.

    `model` is a chunk or the list of a rank's chunks, of which the last one has the output layer:
    `embedding_activation_buffer` and `grad_output_buffer` are its lists.
    """
    if not (is_last_stage and config.defer_embedding_wgrad_compute):
        return None
    module = unwrapped(model[-1] if isinstance(model, list) else model)
    module.embedding_activation_buffer.clear()
    module.grad_output_buffer.clear()
    return module


@torch.no_grad()
def finish_embedding_wgrad_compute(
    config: ModelParallelConfig, embedding_module: Any, is_last_stage: bool, tp_group: dist.ProcessGroup | None
) -> None:
    """Add the deferred weight gradients of all microbatches to the output layer's weight, and empty the buffers.

    Inputs are `[S, B, H]` and gradients of outputs `[S, B, V]`. Under `config.sequence_parallel` each rank of
    `tp_group` has a slice of S of the inputs, which are gathered first. The sum goes to `weight.main_grad` if the
    weight has one, else to `weight.grad`. Collective over `tp_group` under sequence parallelism.
    """
    if not (is_last_stage and config.defer_embedding_wgrad_compute):
        return
    inputs, grads = embedding_module.embedding_activation_buffer, embedding_module.grad_output_buffer
    if len(inputs) != len(grads):
        raise ValueError(f"{len(inputs)} inputs of the output layer are kept, and {len(grads)} gradients")
    weight = _weight(embedding_module)
    while inputs:
        input_SBH, grad_SBV = inputs.pop(0), grads.pop(0)
        if config.sequence_parallel and tp_group is not None:
            whole = [torch.empty_like(input_SBH) for _ in range(tp_group.size())]
            dist.all_gather(whole, input_SBH.contiguous(), group=tp_group)
            input_SBH = torch.cat(whole)
        _add(weight, grad_SBV.flatten(0, -2).t() @ input_SBH.flatten(0, -2))


def _weight(module: Any) -> nn.Parameter:
    weight = (
        module.output_layer.weight
        if module.share_embeddings_and_output_weights
        else module.shared_embedding_or_output_weight()
    )
    assert isinstance(weight, nn.Parameter)
    return weight


def _add(weight: nn.Parameter, grad: Tensor) -> None:
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
    elif weight.grad is not None:
        weight.grad.add_(grad)
    else:
        weight.grad = grad
