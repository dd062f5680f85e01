"""Deferred weight gradient of an output layer, with Megatron-core's functions.

The backward of the output layer computes no weight gradient. It stores the inputs and the output gradients. The GEMMs
run after the last backward, during the pipeline flush.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, unwrapped


class OutputModel(Protocol):
    """Interface of a chunk whose output layer stores its inputs and output gradients."""

    embedding_activation_buffer: list[Tensor]
    grad_output_buffer: list[Tensor]
    output_layer: nn.Linear
    share_embeddings_and_output_weights: bool

    def shared_embedding_or_output_weight(self) -> nn.Parameter: ...


def clear_embedding_activation_buffer(
    config: ModelParallelConfig, model: object, is_last_stage: bool
) -> OutputModel | None:
    """Empty the buffers of the chunk with the output layer and return it, or None if nothing is deferred.

    Args:
        model: a chunk, or the list of the chunks of a rank, of which the last one has the output layer. Its attributes
            `embedding_activation_buffer` and `grad_output_buffer` are lists.
    """
    if not (is_last_stage and config.defer_embedding_wgrad_compute):
        return None
    module = cast(OutputModel, unwrapped(model[-1] if isinstance(model, list) else model))
    module.embedding_activation_buffer.clear()
    module.grad_output_buffer.clear()
    return module


@torch.no_grad()
def finish_embedding_wgrad_compute(
    config: ModelParallelConfig, embedding_module: OutputModel, is_last_stage: bool, tp_group: dist.ProcessGroup | None
) -> None:
    """Add the deferred weight gradients of all microbatches to the weight of the output layer, and empty the buffers.

    Inputs are `[S, B, H]` and output gradients `[S, B, V]`. With `config.sequence_parallel`, each rank of `tp_group`
    has a slice of S of the inputs, which are gathered first (collective). The sum is added to `weight.main_grad` if it
    exists, else to `weight.grad`.
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
            gathered = [torch.empty_like(input_SBH) for _ in range(tp_group.size())]
            dist.all_gather(gathered, input_SBH.contiguous(), group=tp_group)
            input_SBH = torch.cat(gathered)
        _add(weight, grad_SBV.flatten(0, -2).t() @ input_SBH.flatten(0, -2))


def _weight(module: OutputModel) -> Tensor:
    if module.share_embeddings_and_output_weights:
        return module.output_layer.weight
    return module.shared_embedding_or_output_weight()


def _add(weight: Tensor, grad: Tensor) -> None:
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
    elif weight.grad is not None:
        weight.grad.add_(grad)
    else:
        weight.grad = grad
