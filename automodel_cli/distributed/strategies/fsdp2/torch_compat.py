"""Names of FSDP2 that are not public API (torch 2.11 to 2.13), for units whose parameters one rank has for itself.

Relied on: that gathering on one rank copies `all_gather_inputs` into `all_gather_outputs`, which are made once, and
that summing there copies one buffer of `ReduceScatter.allocate` into the next. Where a torch does otherwise, it copies
more. tests/dist/test_alone.py counts the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState


def copy_once(unit: FSDPModule) -> None:
    """Let a unit on one rank cast its parameters and sum its gradients in one pass over them instead of two."""
    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            for param in group.fsdp_params:
                param.__class__ = _CastOnce
            unit.set_custom_reduce_scatter(_InPlace())


class _CastOnce(FSDPParam):
    """The copy into the gathered parameter casts: torch makes a cast copy first, and copies that."""

    def _is_plain(self) -> bool:
        in_shards = self.sharded_state == ShardedState.SHARDED
        return in_shards and not self.offload_to_cpu and not hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        return [self._sharded_param_data] if self._is_plain() else super().all_gather_inputs

    def init_all_gather_outputs(self, numels: Any, dtypes: Any, world_size: int, device: torch.device) -> None:
        if self._is_plain() and self.param_dtype is not None:
            dtypes = [self.param_dtype]
        super().init_all_gather_outputs(numels, dtypes, world_size, device)


class _InPlace(ReduceScatter):
    """On one rank what goes in is what comes out: the second buffer is the first, and torch copies it onto itself."""

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        given, self._given = self._given, None
        if given is not None and (given.shape, given.dtype) == (torch.Size(size), dtype):
            return given
        self._given = torch.empty(*size, dtype=dtype, device=device)
        return self._given

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert output_tensor is input_tensor, "nothing is reduced on one rank"
