"""Gradients as plain sums: their global norm over ranks and parts, and clipping by it.

The loss is divided once, by the weight of the whole step, before backward. So every reduction is a sum, and nothing is
averaged or rescaled by a number of ranks. torch averages by default; each strategy switches that off where it wraps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.mesh import Mesh

_CLIP_EPSILON = 1e-6  # torch's own in clip_grad_norm_
_NORM_BLOCK = 4096


def grad_norm(parts: Sequence[nn.Module], mesh: Mesh) -> Tensor:
    """Global 2-norm of all gradients, float64 scalar on the mesh's device, equal on every rank.

    Counts each parameter once: shards are summed over the axes that shard them and no other, parts over `pp`, and a
    parameter shared within a rank is one. In float64, so that squares cannot overflow: 6e31 stays finite, and only a
    gradient that is inf or nan gives inf or nan. Collective over all ranks of the parts.
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for (device_mesh, axes), local_grads in _groups(_gradients(parts, count_once=True)).items():
        square = _norms(local_grads).square().sum().to(mesh.device)
        for axis in axes:
            assert device_mesh is not None
            dist.all_reduce(square, group=device_mesh.get_group(axis))
        squares += square
    return mesh.sum_over(mesh.pp, squares).sqrt()


@torch.no_grad()
def clip_grad_norm_(parts: Sequence[nn.Module], max_norm: float | None, mesh: Mesh) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`; None only measures.

    Returns the norm before clipping (see `grad_norm`). torch's own function refuses gradients on several meshes or next
    to plain tensors. No host synchronisation: the factor is applied even when it is 1.
    """
    norm = grad_norm(parts, mesh)
    if max_norm is not None:
        factor = (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in _gradients(parts):
            local = _local(grad)
            alike.setdefault((local.device, local.dtype), []).append(local)
        for (device, dtype), grads in alike.items():
            torch._foreach_mul_(grads, factor.to(device=device, dtype=dtype))
    return norm


def _gradients(parts: Sequence[nn.Module], *, count_once: bool = False) -> Iterator[Tensor]:
    """Gradients of all parameters; `count_once` leaves out those that another pipeline stage counts (a tied table)."""
    seen: set[int] = set()
    for part in parts:
        # only parts of a pipeline have this: parameters tied to one that another stage holds and counts
        elsewhere: frozenset[str] = getattr(part, "held_elsewhere", frozenset()) if count_once else frozenset()
        for name, param in part.named_parameters():
            if param.grad is not None and id(param) not in seen and name not in elsewhere:
                seen.add(id(param))
                yield param.grad


def _groups(grads: Iterable[Tensor]) -> dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]]:
    """Local tensors by (mesh, mesh axes over which they are shards). Plain tensors are shards of nothing."""
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
    """float64 [len(local_grads)], on the device of the gradients (several where some are offloaded: on the first's)."""
    if all(grad.device.type == "cuda" for grad in local_grads):  # a few kernels for all
        return torch.stack(torch._foreach_norm(local_grads, 2, dtype=torch.float64))
    return torch.stack([_norm(grad) for grad in local_grads])


def _norm(local_grad: Tensor) -> Tensor:
    """2-norm of one tensor, float64, accumulated as such: exact to 1e-9 where one float32 sum is off by 1e-5 and more
    in a tensor of millions."""
    if local_grad.device.type == "cpu" and local_grad.dtype != torch.float64:
        # Converting costs 6 times the norm on a CPU. Norms of short blocks in float32, added up in float64, cost the
        # same as one norm, and looking at the result costs nothing.
        flat = local_grad.reshape(-1)
        whole = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
        blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_BLOCK), dim=1, dtype=torch.float32)
        rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.cat([blocks, rest[None]]).double())
        if bool(norm.isfinite()):
            return norm
    return torch.linalg.vector_norm(local_grad, dtype=torch.float64)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
