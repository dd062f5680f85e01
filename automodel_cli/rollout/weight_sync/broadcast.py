"""Weight sync by broadcast: rank 0 of the run and the workers of all servers form one `torch.distributed` group.

The servers use SGLang's `/init_weights_update_group` and `/update_weights_from_distributed` (0.5.21 and later: between
`/begin_weight_update` and `/end_weight_update`). All servers receive the same broadcast, so several servers take no
longer than one.

Example: two servers with 4 workers each form a group of 9. Rank 0 is the trainer, ranks 1 to 4 and 5 to 8 are the
workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.process_group import group_beside
from automodel_cli.rollout.weight_sync.transports import Bucket, Paused, Receiver
from automodel_cli.rollout.weight_sync.update_requests import Watch, begun, once, posted

if TYPE_CHECKING:
    from automodel_cli.rollout.http import Server


class GroupTransfer:
    """Transfer of a group that meets at `address`:`port`. The trainer is rank 0 and sends from `device`."""

    def __init__(self, address: str, port: int, device: torch.device):
        self._address, self._port, self._device = address, port, device
        self._store: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._servers: tuple[str, ...] = ()

    def send(self, receiver: Receiver, buckets: Iterator[Bucket], paused: Paused) -> None:
        """See `Transfer`."""
        self.send_to([receiver], buckets, [paused])

    def send_to(self, receivers: Sequence[Receiver], buckets: Iterator[Bucket], paused: Sequence[Paused]) -> None:
        """See `SharedTransfer`. After a server is lost or returns, the servers form a new group."""
        servers = [receiver.server for receiver in receivers]
        with ExitStack() as stack:
            for pause in paused:
                stack.enter_context(pause())
            watch = Watch(servers[0])
            self._meet(receivers, watch)
            _request_all(servers, watch, "/begin_weight_update", {})
            try:
                first = True
                for bucket in buckets:
                    about = {
                        "names": [name for name, _ in bucket],
                        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                        "shapes": [list(tensor.shape) for _, tensor in bucket],
                        "group_name": self._name,
                        "flush_cache": first,  # no computation happens before the last bucket
                    }
                    _request_all(
                        servers, watch, "/update_weights_from_distributed", about, partial(self._broadcast, bucket)
                    )
                    first = False
            except BaseException:
                for server in servers:  # or none could begin another
                    with suppress(RunError):
                        once(server, "/end_weight_update", {})
                raise
            _request_all(servers, watch, "/end_weight_update", {})

    def _meet(self, receivers: Sequence[Receiver], watch: Watch) -> None:
        """Return a group of exactly these servers: the current group, or a new one if servers were lost or returned."""
        servers = tuple(receiver.server.url for receiver in receivers)
        # Creating a group costs time on all servers, so it is kept between updates.
        if self._group is not None and servers == self._servers:
            return
        limit = timedelta(seconds=receivers[0].server.timeout)
        if self._store is None:
            self._store = TCPStore(
                self._address, self._port, is_master=True, wait_for_workers=False, timeout=limit, multi_tenant=True
            )
        for receiver in receivers:
            with suppress(RunError):  # of a run that was killed in between
                once(receiver.server, "/end_weight_update", {})
        self._name, self._servers = f"weights-{uuid.uuid4().hex[:8]}", servers
        workers = [receiver.num_ranks() for receiver in receivers]
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        # Servers with 4 and 2 workers: rank_offset 1 and 5, world_size 7. Rank 0 is the trainer.
        bodies = [
            {
                "master_address": self._address,
                "master_port": self._port,
                "rank_offset": 1 + sum(workers[:number]),
                "world_size": 1 + sum(workers),
                "group_name": self._name,
                "backend": backend,
            }
            for number in range(len(workers))
        ]
        join = partial(group_beside, self._store, self._name, 1 + sum(workers), backend, limit)
        posts = [
            begun(partial(posted, receiver.server, "/init_weights_update_group", body, watch))
            for receiver, body in zip(receivers, bodies, strict=True)
        ]
        # Servers and trainer meet in a rendezvous, so the requests must be in flight while the trainer joins.
        self._group = watch.run(join)
        for post in posts:
            post.result()

    def _broadcast(self, bucket: Bucket) -> None:
        assert self._group is not None
        for _, tensor in bucket:
            # One tensor after the other, in the order of `names`. The servers run the same loop.
            dist.broadcast(tensor.detach().to(self._device).contiguous(), src=0, group=self._group)


def _request_all(
    servers: Sequence[Server],
    watch: Watch,
    path: str,
    body: dict[str, object],
    ours: Callable[[], None] = lambda: None,
) -> None:
    """Every server together, while `ours` is our half."""
    posts = [begun(partial(posted, server, path, body, watch)) for server in servers]

    def both() -> None:
        ours()
        for post in posts:
            post.result()

    watch.run(both)
