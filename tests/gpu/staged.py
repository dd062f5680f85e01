"""Several ranks on one GPU over gloo, which sends and receives host memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_Batch = Callable[[list[dist.P2POp]], list[dist.Work]]


@contextmanager
def messages_through_the_host() -> Iterator[None]:
    """Copy the tensors of sends and receives between ranks to host memory and back. NCCL refuses two ranks on one
    GPU."""
    batch = dist.batch_isend_irecv
    dist.batch_isend_irecv = _staged(batch)
    try:
        yield
    finally:
        dist.batch_isend_irecv = batch


def _staged(batch: _Batch) -> _Batch:
    def send_and_receive(operations: list[dist.P2POp]) -> list[dist.Work]:
        on_host = [
            o.tensor.cpu() if o.op is dist.isend else torch.empty_like(o.tensor, device="cpu") for o in operations
        ]
        works = batch(
            [
                dist.P2POp(o.op, x, group=o.group, tag=o.tag, group_peer=o.group_peer)
                for o, x in zip(operations, on_host, strict=True)
            ]
        )
        return [_Copied(work, o, x) for work, o, x in zip(works, operations, on_host, strict=True)]  # type: ignore[misc]

    return send_and_receive


@dataclass
class _Copied:
    """Work that copies what it received to the device."""

    work: dist.Work
    operation: dist.P2POp
    on_host: Tensor

    def wait(self) -> bool:
        self.work.wait()
        if self.operation.op is dist.irecv:
            self.operation.tensor.copy_(self.on_host)
        return True
