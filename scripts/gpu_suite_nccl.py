"""NCCL on the GPUs of this machine, one rank per GPU: one piece of `scripts/gpu_suite.sh`.

Groups are made as a run makes them: bound to the device, split from the group of the world. Every collective that the
package uses is compared with its definition, also with one rank. `--cpu` runs the same over gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, world: int, store: str, device_type: str) -> None:
    cuda = device_type == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        device_id=device if cuda else None,
    )
    everyone = list(range(world))
    split = dist.split_group(split_ranks=[everyone]) if cuda else dist.new_group(everyone)
    for group in (None, split, dist.new_group(everyone)):
        _collectives(rank, world, device, group)
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=dist.new_group(everyone, backend="gloo"))
    assert objects == [{"rank": r} for r in range(world)]
    dist.barrier()
    dist.destroy_process_group()


def _collectives(rank: int, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    mine = torch.arange(4.0, device=device) + 10 * rank
    of_ranks = [torch.arange(4.0, device=device) + 10 * r for r in range(world)]
    total = mine.clone()
    dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, sum(of_ranks))
    gathered = torch.empty(4 * world, device=device)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    torch.testing.assert_close(gathered, torch.cat(of_ranks))
    for dtype in (torch.float32, torch.bfloat16):
        shard = torch.empty(4, device=device, dtype=dtype)
        dist.reduce_scatter_tensor(shard, torch.ones(4 * world, device=device, dtype=dtype), group=group)
        torch.testing.assert_close(shard, torch.full_like(shard, world))
    # Unequal pieces, also empty ones: rank r sends r + 1 - s (at least 0) rows to rank s.
    send = [max(rank + 1 - s, 0) for s in range(world)]
    receive = [max(r + 1 - rank, 0) for r in range(world)]
    arriving = torch.empty(sum(receive), 3, device=device)
    rows = torch.full((sum(send), 3), float(rank), device=device)
    dist.all_to_all_single(arriving, rows, receive, send, group=group, async_op=True).wait()
    wanted = torch.cat([torch.full((count, 3), float(r), device=device) for r, count in enumerate(receive)])
    torch.testing.assert_close(arriving, wanted)
    if world > 1:  # NCCL and gloo have no transfer of a rank to itself outside a group call.
        following, previous = (rank + 1) % world, (rank - 1) % world
        got = torch.empty_like(mine)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, following, group), dist.P2POp(dist.irecv, got, previous, group)]
        ):
            work.wait()
        torch.testing.assert_close(got, of_ranks[previous])


def main(arguments: list[str]) -> int:
    device_type = "cpu" if "--cpu" in arguments else "cuda"
    world = torch.cuda.device_count() if device_type == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        mp.spawn(_rank, (world, str(Path(folder) / "store"), device_type), nprocs=world)
    print(f"{world} ranks on {device_type}: every collective has the values of its definition")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
