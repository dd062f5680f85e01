"""Adaptations of data-parallel strategies other than FSDP2 to fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from automodel_cli.distributed.strategies.ddp import wrap
from automodel_cli.distributed.strategies.megatron_fsdp import sharding
from automodel_cli.distributed.strategies.megatron_fsdp.compat import held_tensors
from automodel_cli.distributed.strategies.megatron_fsdp.handle import MegatronPart
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.dryrun.fake_device import torch_compat
from automodel_cli.dryrun.fake_device.ddp import FakeDDP
from automodel_cli.planning.simulated_clock import Clock


class Strategies:
    """Installs itself before stages are built; not undone.

    DDP's reducer is compiled: one in Python takes its place, and the part stays on meta until it is filled.
    Megatron-FSDP copies parameters into its buffers while it wraps: there `fill` comes first, and both inside
    `faking()`.
    """

    def __init__(
        self, clock: Clock, fill: Callable[[nn.Module], None], faking: Callable[[], AbstractContextManager[None]]
    ):
        self._clock, self._ddp, self._megatron = clock, list[FakeDDP](), list[MegatronPart]()
        self._fill, self._faking = fill, faking
        self._parallelize = sharding.megatron_fsdp_strategy_parallelize
        set_attributes(wrap, DistributedDataParallel=self._wrap, materialize=_later)
        set_attributes(sharding, materialize=self._filled, megatron_fsdp_strategy_parallelize=self._sharded)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of what they hold besides parameters and gradients that modules show."""
        for ddp in self._ddp:
            for buffer in ddp.bucket_buffers():
                yield "gradient buckets", buffer
        for part in self._megatron:
            yield from held_tensors(part.wrapped)

    def _wrap(self, module: nn.Module, **options: Any) -> FakeDDP:
        self._ddp.append(FakeDDP(module, clock=self._clock, **options))
        return self._ddp[-1]

    def _filled(self, part: nn.Module, device: torch.device) -> None:
        with self._faking():
            self._fill(part)

    def _sharded(self, *args: Any, **kwargs: Any) -> Any:
        with self._faking(), torch_compat.modules_stay():
            module, optimizer = self._parallelize(*args, **kwargs)
        if isinstance(module, MegatronPart):
            self._megatron.append(module)
        return module, optimizer


def _later(module: nn.Module, device: torch.device) -> None:
    """In the place of memory on a device that is not there."""
