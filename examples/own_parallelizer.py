"""A data-parallel strategy of your own: whole copies, and one all-reduce of every gradient after the last microbatch.

    automodel finetune llm -c quickstart mesh.dp_size=2 train.microbatch_size=4 \
        parallelizer._target_=own_parallelizer.FlatAllReduce --trust-package own_parallelizer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from automodel_cli.distributed.layer_wrapping import materialize, prepare_layers
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.sharded_module import Sharded, register_handle
from automodel_cli.distributed.strategies.base import ParallelizerConfig


@dataclass(frozen=True)
class FlatAllReduce(ParallelizerConfig):
    """`max_elements` of one message: more of it is fewer messages and a larger copy of the gradients."""

    supports: ClassVar[frozenset[str]] = frozenset({"sampler"})

    max_elements: int = 1 << 24

    def shard(self, part: nn.Module, mesh: Mesh) -> nn.Module:
        prepare_layers(part, self, mesh.device.type)
        materialize(part, mesh.device)
        register_handle(_Copies(part, mesh.dp.get_group(), self.max_elements), part)
        return part


class _Copies(Sharded):
    def __init__(self, part: nn.Module, group: dist.ProcessGroup, max_elements: int):
        super().__init__(part)
        self._group, self._max_elements = group, max_elements

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        yield
        if is_last:
            for grads in self._messages():
                flat = torch.cat([grad.flatten() for grad in grads])
                dist.all_reduce(flat, group=self._group)  # a sum: the loss is divided by the global weight already
                for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(summed.view_as(grad))

    def _messages(self) -> Iterator[list[torch.Tensor]]:
        message: list[torch.Tensor] = []
        for param in self.part.parameters():
            if not param.requires_grad:
                continue
            if param.grad is None:  # not used on this rank, maybe on another
                param.grad = torch.zeros_like(param)
            message.append(param.grad)
            if sum(grad.numel() for grad in message) >= self._max_elements:
                yield message
                message = []
        if message:
            yield message
