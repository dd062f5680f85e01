"""Gradients as plain sums: over ranks, over microbatches, and their global norm.

The loss is divided once, by the weight of the whole step, before backward. So every reduction here is a sum, and
nothing is averaged or rescaled by a number of ranks. torch averages by default; `sum_gradients` is where that is
switched off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.megatron_fsdp import MegatronPart
from automodel_cli.distributed.mesh import Mesh

_CLIP_EPSILON = 1e-6  # torch's own in clip_grad_norm_

_syncs_every_microbatch: WeakSet[nn.Module] = WeakSet()


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP2 or DDP sum gradients over ranks instead of averaging them. Call once, after wrapping."""
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(module.process_group, _all_reduce_sum)
    for submodule in fsdp_modules(module):
        # Neither setter is recursive. The second makes it a plain sum: without it torch asks for a pre-multiplied one,
        # which gloo does not have.
        submodule.set_gradient_divide_factor(1.0)
        submodule.set_force_sum_reduction_for_comms(True)


def sync_every_microbatch(module: nn.Module) -> None:
    """Let `gradient_sync` reduce on each microbatch of this module (`defer_fsdp_grad_sync=false`)."""
    _syncs_every_microbatch.add(module)


@contextmanager
def gradient_sync(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Around forward and backward of one microbatch: gradients are reduced over ranks on the last one of the step.

    A module without data parallelism passes through. Collective when `is_last`.
    """
    if isinstance(module, MegatronPart):
        with module.microbatch(is_last):
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or module in _syncs_every_microbatch)
        module.set_is_last_backward(is_last)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
            module.set_is_last_backward(True)
        return
    skip_reduction = isinstance(module, DistributedDataParallel) and not is_last
    if skip_reduction and module.static_graph:
        raise ConfigError(
            "static_graph=true works with one microbatch per step only: torch's DDP fails when the first ones are not "
            "reduced",
            keys=("static_graph",),
            fix="parallelizer.static_graph=false",
        )
    with module.no_sync() if skip_reduction else nullcontext():  # type: ignore[operator]
        yield


def reshard(module: nn.Module) -> None:
    """Free gathered parameters. Needed after a forward that has no backward: until then the module shows gathered
    plain tensors where optimizer, checkpoint and export expect shards, and they go stale when the shards change."""
    if isinstance(module, MegatronPart):
        module.reshard()
    for submodule in fsdp_modules(module):
        submodule.reshard()


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def unwrap(module: nn.Module) -> nn.Module:
    """The part inside a wrapper of DDP or Megatron-FSDP; anything else is a part already (FSDP2 works in place)."""
    if isinstance(module, MegatronPart):
        return module.part
    return module.module if isinstance(module, DistributedDataParallel) else module


def grad_norm(parts: Sequence[nn.Module], mesh: Mesh) -> Tensor:
    """Global 2-norm of all gradients, float64 scalar on the mesh's device, equal on every rank.

    Counts each parameter once: shards are summed over the axes that shard them and no other, parts over `pp`, and a
    parameter shared within a rank is one. In float64, so that squares cannot overflow: 6e31 stays finite, and only a
    gradient that is inf or nan gives inf or nan. Collective over all ranks of the parts.
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for (device_mesh, axes), local_grads in _groups(_gradients(parts, count_once=True)).items():
        square = torch.stack([_norm(g) for g in local_grads]).square().sum().to(mesh.device)
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
        for grad in _gradients(parts):
            local = _local(grad)
            local.mul_(factor.to(device=local.device, dtype=local.dtype))
    return norm


def _all_reduce_sum(group, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """DDP communication hook: unlike torch's own, it does not divide by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


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


def _norm(local_grad: Tensor) -> Tensor:
    """2-norm of one tensor, float64."""
    if local_grad.device.type == "cpu" and local_grad.dtype != torch.float64:
        # Converting costs 20 to 30 times the norm on a CPU, and looking at the result costs nothing.
        norm = torch.linalg.vector_norm(local_grad, dtype=torch.float32).double()
        if bool(norm.isfinite()):
            return norm
    return torch.linalg.vector_norm(local_grad, dtype=torch.float64)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
