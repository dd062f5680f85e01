"""Start and stop this process's default group: gloo on the CPU, nccl (and gloo for host tensors) on CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

from automodel_cli.distributed import rendezvous
from automodel_cli.launch import environment

T = TypeVar("T")
_timeout: timedelta | None = None
_STORE_TIMEOUT = timedelta(seconds=10)
_RECORDED = "2000"
"""Collectives that the flight recorder keeps: some hundred bytes each."""


def init_process_group(backend: str = "nccl", *, timeout_minutes: float = 30.0) -> torch.device:
    """Join the default group and return the device that this rank computes on.

    Rank and size come from RANK, WORLD_SIZE, LOCAL_RANK as torchrun and our Slurm launcher set them; without them, or
    with one rank, the group is made in memory and needs no network. `backend="nccl"` means CUDA where there is CUDA and
    gloo on the CPU elsewhere; `"gloo"` means the CPU in any case. The timeout holds for every group of the mesh too
    (`hold_timeout`): it is how long a rank waits for one that is stuck, so it must exceed the longest difference
    between ranks (a slow checkpoint file system). Collective. Starting twice is a bug of ours.
    """
    global _timeout
    assert not dist.is_initialized(), "the process group was started twice"
    _timeout = timeout = timedelta(minutes=timeout_minutes)
    environment.set_default("TORCH_FR_BUFFER_SIZE", _RECORDED)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device, backends = _device_and_backends(backend)
    bound_device = device if device.type == "cuda" else None  # lets nccl connect now, with the right GPU
    if world_size == 1:
        alone = dist.HashStore()
        dist.init_process_group(backends, store=alone, rank=0, world_size=1, timeout=timeout, device_id=bound_device)
    else:
        rank = int(os.environ["RANK"])
        store = rendezvous.meet(rank, world_size, timeout)
        try:
            dist.init_process_group(
                backends, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound_device
            )
        except RuntimeError as error:
            if "gloo" not in str(error).lower():
                raise
            raise rendezvous.unconnected(error) from None
    return device


@contextmanager
def process_group(backend: str = "nccl", *, timeout_minutes: float = 30.0) -> Iterator[torch.device]:
    """Join the default group, and leave it after success; see `start`.

    NCCL's shutdown is collective. A rank that fails alone would wait in it for the others, which wait for that rank,
    and the reason would never be printed. So a rank of several that fails keeps its group: it prints the reason and
    ends by `os._exit` (`launch.worker.leave`).
    """
    device = init_process_group(backend, timeout_minutes=timeout_minutes)
    try:
        yield device
    except BaseException:
        if dist.is_initialized() and dist.get_world_size() == 1:
            stop()
        raise
    stop()


def hold_timeout() -> None:
    """Give every group that exists the timeout that `start` was called with; none where it was not called.

    torch gives a group made from another one its backend's default instead, 10 minutes for nccl, and DeviceMesh has no
    argument for it.
    """
    if _timeout is not None:
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(_timeout, group)


def own_store() -> dist.Store | None:
    """A connection of its own to the store that the ranks met at, for another thread; None where one process is all."""
    if dist.get_world_size() == 1:
        return None
    store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    assert isinstance(store, dist.Store)
    store.set_timeout(_STORE_TIMEOUT)
    return store


def group_beside(store: dist.Store, name: str, size: int, backend: str, limit: timedelta) -> dist.ProcessGroup:
    """This process as rank 0 of a group of `size` whose other ranks are not of its world, and meet at `store` under
    `name`, as servers of SGLang do. Blocks until all are there, or raises after `limit`.

    torch makes groups of ranks of the world only; the way in which it makes the world itself takes any.
    """
    keys, named, kind = dist.PrefixStore(name, store), cast(Any, name), distributed_c10d.Backend(backend)
    group, _ = distributed_c10d._new_process_group_helper(size, 0, [], kind, keys, group_name=named, timeout=limit)
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def from_first_rank(work: Callable[[], T], limit: timedelta) -> T:
    """What `work` returns or raises on rank 0, on every rank. The others wait in a gloo group of their own, at most
    `limit`: no collective of the run is open meanwhile. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group = dist.new_group(backend="gloo", timeout=limit)
    outcome: list[tuple[T | None, Exception | None] | None] = [None]
    try:
        if dist.get_rank() == 0:
            try:
                outcome = [(work(), None)]
            except Exception as error:  # every rank must learn of it, and leave in the same way
                outcome = [(None, error)]
        dist.broadcast_object_list(outcome, 0, group=group, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group(group)
    assert outcome[0] is not None
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return cast(T, result)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def recorded_collectives() -> bytes | None:
    """torch's flight recorder as JSON: the last collectives of this rank, nccl's and gloo's; None where there is none.

    torch 2.11 to 2.13 have it under this name.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else dump()


def stop() -> None:
    """Leave the default group and every group made from it; harmless when none was started or it was stopped before."""
    if dist.is_initialized():
        dist.destroy_process_group()


def destroy_dist_connection() -> None:
    """End the process group. The documented name of `stop` for programs that import it."""
    stop()


def _device_and_backends(backend: str) -> tuple[torch.device, str]:
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, f"cpu:gloo,cuda:{backend}"


def wait_for_each_collective() -> None:
    """On the CPU, let DTensor wait for a collective where it starts it, for the rest of the process.

    DTensor starts collectives and waits for them where their result is used, so that several of a group are in flight.
    gloo does not keep them apart reliably: under tensor with sequence and context parallelism about every second run of
    100 microbatches stood still, each rank waiting for another one's step. There is nothing to overlap with on the CPU
    either: waiting at once is a third faster. (`_maybe_wrap_tensor` decides in torch 2.11 to 2.13 whether to wait.)
    """
    functional._maybe_wrap_tensor = functional.wait_tensor
