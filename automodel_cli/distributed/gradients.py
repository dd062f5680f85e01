"""Global gradient norm over ranks and parts, and clipping.

Gradients are sums: the loss is divided once, by the weight of the whole step, before backward. Reductions therefore sum
and never average or rescale by a number of ranks. torch averages by default. Each strategy disables that when it wraps
a part.

Example: 2 ranks with 3 and 5 trained tokens. Both divide their loss by 8, and the summed gradient is that of one
process with 8 tokens. An average over ranks of per-rank means would weight the tokens 1/6 and 1/10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.tensors import to_local

_CLIP_EPSILON = 1e-6  # As in torch's clip_grad_norm_.
_NORM_BLOCK = 4096


def grad_norm(parts: Sequence[nn.Module], mesh: Mesh) -> Tensor:
    """Return the global 2-norm of all gradients, a float64 scalar on the device of the mesh, equal on every rank.

    Counts each parameter once: shards are summed over the axes that shard them, parts over `pp`, and a shared parameter
    of a rank counts once. In float64 squares do not overflow: a gradient of 6e31 gives a finite norm, and only inf or
    nan give inf or nan. Collective over all ranks of the parts.
    """
    # Example: a matrix sharded over 2 ranks with norms 3 and 4, and a replicated vector with norm 12. The first group
    # sums 9 + 16 over its axis, the second has 144 on every rank and no axis. The norm is sqrt(25 + 144) = 13.
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for (device_mesh, axes), local_grads in _groups(_gradients(parts, count_once=True)).items():
        # Shards of one parameter are disjoint, so their squares add up to the square of the full norm.
        square = _norms(local_grads).square().sum().to(mesh.device)
        for axis in axes:
            assert device_mesh is not None
            dist.all_reduce(square, group=device_mesh.get_group(axis))
        squares += square
    # Stages have different parameters, so their squares add up too.
    return mesh.sum_over(mesh.pp, squares).sqrt()


@torch.no_grad()
def clip_grad_norm_(parts: Sequence[nn.Module], max_norm: float | None, mesh: Mesh) -> Tensor:
    """Scale all gradients in place to a global norm of at most `max_norm`. None only measures.

    Returns the norm before clipping (see `grad_norm`). torch's own function rejects gradients on several meshes, and
    DTensors together with plain tensors. No host synchronization: the factor is applied even if it is 1.
    """
    norm = grad_norm(parts, mesh)
    if max_norm is not None:
        # Example: norm 4 and max_norm 1 give 0.25. A norm below max_norm gives 1.
        factor = (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in _gradients(parts):
            local = to_local(grad)
            alike.setdefault((local.device, local.dtype), []).append(local)
        for (device, dtype), grads in alike.items():
            # One kernel for many tensors. The loop groups them, because `_foreach` needs one device and dtype.
            torch._foreach_mul_(grads, factor.to(device=device, dtype=dtype))
    return norm


def _gradients(parts: Sequence[nn.Module], *, count_once: bool = False) -> Iterator[Tensor]:
    """Yield the gradients of all parameters. `count_once` skips parameters that another pipeline stage counts (tied
    tables).
    """
    seen: set[int] = set()
    for part in parts:
        # Names of parameters that are tied to a parameter of another pipeline stage.
        elsewhere: frozenset[str] = getattr(part, "held_elsewhere", frozenset()) if count_once else frozenset()
        for name, param in part.named_parameters():
            if param.grad is not None and id(param) not in seen and name not in elsewhere:
                seen.add(id(param))
                yield param.grad


def _groups(grads: Iterable[Tensor]) -> dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]]:
    """Group local tensors by (mesh, mesh axes that shard them). Plain tensors are not sharded."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            assert not any(p.is_partial() for p in grad.placements), f"a gradient is not reduced yet: {grad.placements}"
            axes = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
            groups.setdefault((grad.device_mesh, axes), []).append(grad.to_local())
        else:
            groups.setdefault((None, ()), []).append(grad)
    return groups


def _norms(local_grads: list[Tensor]) -> Tensor:
    """Return the norms, float64 [len(local_grads)], on the device of the first gradient."""
    if all(grad.device.type == "cuda" for grad in local_grads):  # A few kernels for all tensors.
        return torch.stack(torch._foreach_norm(local_grads, 2, dtype=torch.float64))
    return torch.stack([_norm(grad) for grad in local_grads])


def _norm(local_grad: Tensor) -> Tensor:
    """Return the 2-norm of one tensor, accumulated in float64.

    Exact to 1e-9. A float32 sum has an error of 1e-5 or more in a tensor of millions of elements.
    """
    if local_grad.device.type == "cpu" and local_grad.dtype != torch.float64:
        # Conversion to float64 takes 6 times as long as the norm on a CPU. Norms of short blocks in float32, summed in
        # float64, take as long as one norm. The check of the result is free.
        flat = local_grad.reshape(-1)
        num_blocked = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
        blocks = torch.linalg.vector_norm(flat[:num_blocked].view(-1, _NORM_BLOCK), dim=1, dtype=torch.float32)
        rest = torch.linalg.vector_norm(flat[num_blocked:], dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.cat([blocks, rest[None]]).double())
        if bool(norm.isfinite()):
            return cast("Tensor", norm)
    exact: Tensor = torch.linalg.vector_norm(local_grad, dtype=torch.float64)
    return exact
