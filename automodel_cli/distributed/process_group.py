"""Start and stop the default process group: gloo on the CPU, nccl (and gloo for host tensors) on CUDA."""

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
"""Number of collectives in the flight recorder, some hundred bytes each."""


def init_process_group(backend: str = "nccl", *, timeout_minutes: float = 30.0) -> torch.device:
    """Initialize the default group and return the device of this rank. Collective. Must be called once.

    Rank and size come from RANK, WORLD_SIZE and LOCAL_RANK, which torchrun and the Slurm launcher set. Without them, or
    with one rank, the group is in memory and needs no network.

    Args:
        backend: "nccl" selects CUDA if available, else gloo on the CPU. "gloo" always selects the CPU.
        timeout_minutes: timeout of all groups of the mesh (`hold_timeout`). A rank waits so long for a stuck rank. It
            must exceed the longest delay between ranks, for example of a slow checkpoint file system.
    """
    global _timeout
    assert not dist.is_initialized(), "the process group was started twice"
    _timeout = timeout = timedelta(minutes=timeout_minutes)
    environment.set_default("TORCH_FR_BUFFER_SIZE", _RECORDED)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device, backends = _device_and_backends(backend)
    bound_device = device if device.type == "cuda" else None  # Lets nccl connect now, with the right GPU.
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
    """Initialize the default group, and destroy it after success. See `init_process_group`.

    NCCL's shutdown is collective. A single failed rank would wait in it for the others, which wait for that rank, and
    its error would never be printed. Therefore a failed rank keeps its group, prints the error and ends with `os._exit`
    (`launch.worker.leave`).
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
    """Set the timeout of `init_process_group` on every existing group.

    torch gives a derived group the default of its backend (10 minutes for nccl), and DeviceMesh has no argument for it.
    """
    if _timeout is not None:
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(_timeout, group)


def own_store() -> dist.Store | None:
    """Return a new connection to the rendezvous store, for another thread. None with one process."""
    if dist.get_world_size() == 1:
        return None
    store: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(_STORE_TIMEOUT)
    return store


def group_beside(store: dist.Store, name: str, size: int, backend: str, limit: timedelta) -> dist.ProcessGroup:
    """Create a group with this process as rank 0 and `size` - 1 processes outside this job, such as SGLang servers.

    The processes meet at `store` under `name`. Blocks until all are connected, or raises after `limit`. The public
    interface of torch creates groups of ranks of the world only, so this uses the function that creates the world.
    """
    keys, named, kind = dist.PrefixStore(name, store), cast(Any, name), distributed_c10d.Backend(backend)
    group, _ = distributed_c10d._new_process_group_helper(size, 0, [], kind, keys, group_name=named, timeout=limit)
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return cast("dist.ProcessGroup", group)


def from_first_rank(work: Callable[[], T], limit: timedelta) -> T:
    """Return or raise on every rank what `work` returns or raises on rank 0. Collective.

    The other ranks wait at most `limit` in a separate gloo group, so that no collective of the run is pending.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group = dist.new_group(backend="gloo", timeout=limit)
    outcome: list[tuple[T | None, Exception | None] | None] = [None]
    try:
        if dist.get_rank() == 0:
            try:
                outcome = [(work(), None)]
            except Exception as error:  # Every rank must raise it.
                # Without this, rank 0 would raise while the others wait for its broadcast until the timeout.
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def recorded_collectives() -> bytes | None:
    """Return torch's flight recorder as JSON: the last collectives of this rank. None if it is not available.

    Private name in torch 2.11 to 2.13.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else dump()


def stop() -> None:
    """Destroy the default group and all groups derived from it. No effect if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def destroy_dist_connection() -> None:
    """Destroy the process group. Documented name of `stop` for programs that import this package."""
    stop()


def _device_and_backends(backend: str) -> tuple[torch.device, str]:
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, f"cpu:gloo,cuda:{backend}"


def wait_for_each_collective() -> None:
    """Make DTensor wait for each collective immediately, on the CPU, for the rest of the process.

    DTensor starts collectives and waits when their result is used, so that several of a group are in flight. gloo does
    not separate them reliably: with tensor, sequence and context parallelism, about every second run of 100
    microbatches deadlocked. There is nothing to overlap on the CPU, and waiting immediately is a third faster.
    `_maybe_wrap_tensor` decides in torch 2.11 to 2.13 whether to wait.
    """
    functional._maybe_wrap_tensor = functional.wait_tensor
