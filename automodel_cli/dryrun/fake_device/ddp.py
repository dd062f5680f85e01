"""torch's DistributedDataParallel in Python, for tensors without values: its reducer is compiled and reads them.

By the reducer's rules: buckets are filled in the order in which gradients arrive, the first one of 1 MiB and the others
of `bucket_cap_mb`; a full one is reduced at once, beside backward; at its end gradients are copied out of the buckets,
unless they live there. Rules: torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.dryrun.fake_device import torch_compat
from automodel_cli.planning.simulated_clock import Clock

_FIRST_MIB, _OTHERS_MIB = 1.0, 25.0


@dataclass
class _Bucket:
    params: list[nn.Parameter]
    buffer: Tensor
    missing: int = 0
    views: dict[Tensor, Tensor] = field(default_factory=dict)


class FakeDDP(nn.Module):
    """Takes what the strategy gives to torch's class, and a clock that waits for the group's messages."""

    def __init__(
        self,
        module: nn.Module,
        *,
        clock: Clock,
        process_group: dist.ProcessGroup,
        static_graph: bool,
        broadcast_buffers: bool,
        bucket_cap_mb: float | None,
        gradient_as_bucket_view: bool,
        **_: object,
    ):
        super().__init__()
        self.module, self.process_group, self._clock = module, process_group, clock
        self.static_graph, self._broadcasts, self._bucket_mib = static_graph, broadcast_buffers, bucket_cap_mb
        self._in_buckets = gradient_as_bucket_view
        self._buckets: list[_Bucket] = []
        self._of: dict[Tensor, _Bucket] = {}
        self._reduces = True

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Of the strategy's hook this knows that it is a sum."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def bucket_buffers(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self._buckets]

    def forward(self, *args: object, **kwargs: object) -> object:
        if not self._buckets:
            self._make_buckets()
        if torch.is_grad_enabled():
            if self._broadcasts:
                for buffer in self.module.buffers():
                    dist.broadcast(buffer, 0, group=self.process_group)
            for bucket in self._buckets:
                bucket.missing = len(bucket.params)
        return self.module(*args, **kwargs)

    def _make_buckets(self) -> None:
        limit = self._bucket_mib
        sizes = (_FIRST_MIB, _OTHERS_MIB) if limit is None else (limit, limit)
        groups: list[list[nn.Parameter]] = [[]]
        for param in reversed([p for p in self.module.parameters() if p.requires_grad]):
            groups[-1].append(param)
            filled = sum(p.numel() * p.element_size() for p in groups[-1])
            if filled >= sizes[min(len(groups) - 1, 1)] * 2**20:
                groups.append([])
        for params in filter(None, groups):
            total = sum(p.numel() for p in params)
            bucket = _Bucket(params, torch.empty(total, dtype=params[0].dtype, device=params[0].device))
            pieces = bucket.buffer.split([p.numel() for p in params])
            bucket.views = {p: piece.view(p.shape) for p, piece in zip(params, pieces, strict=True)}
            for param in params:
                self._of[param] = bucket
                param.register_post_accumulate_grad_hook(self._arrived)
            self._buckets.append(bucket)

    def _arrived(self, param: Tensor) -> None:
        assert param.grad is not None
        bucket, in_buckets = self._of[param], self._in_buckets
        view = bucket.views[param]
        if param.grad is not view and (in_buckets or self._reduces):
            view.copy_(param.grad)
            if in_buckets:
                param.grad = view
        if not self._reduces:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            dist.all_reduce(bucket.buffer, group=self.process_group, async_op=True)
            if all(b.missing == 0 for b in self._buckets):
                torch_compat.at_end_of_backward(self._finish)

    def _finish(self) -> None:
        self._clock.wait_for_group(self.process_group.group_name)
        for bucket in self._buckets:
            if not self._in_buckets:
                for param, view in bucket.views.items():
                    assert param.grad is not None
                    param.grad.copy_(view)
