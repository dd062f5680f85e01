"""Sums over ranks inside autograd, of values that ranks have in parts or of gradients of what they share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from automodel_cli.distributed.typed_torch import Ctx, Function


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # Autograd may pass the same tensor to other nodes.
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumValue(Function):
    @staticmethod
    def forward(ctx: Ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same value, and sum its gradient over the mesh. For replicated tensors that ranks use differently."""
    # Example: x is equal on 2 ranks, and each computes y_r = x W_r^T. The gradient of x is dy_0 W_0 + dy_1 W_1, so the
    # parts of the ranks are summed (f of Megatron-LM). `sum_value` is the transpose: forward sums, backward copies (g).
    result: Tensor = _SumGradient.apply(tensor, mesh.get_group())
    return result


def sum_value(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over the mesh, and pass the gradient unchanged to each rank. For partial results."""
    result: Tensor = _SumValue.apply(tensor, mesh.get_group())
    return result
