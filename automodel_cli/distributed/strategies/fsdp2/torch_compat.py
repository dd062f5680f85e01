"""Private names of FSDP2 (torch 2.11 to 2.15).

Used for units on one rank, and for GEMMs that accumulate into the sum over microbatches. Assumptions:

- Gathering on one rank copies `all_gather_inputs` into `all_gather_outputs`, which are allocated once. Reduction on one
  rank copies one buffer of `ReduceScatter.allocate` into the next. Otherwise torch copies more.
  tests/dist/test_alone.py counts the copies.
- A gathered parameter and its buffers are created in `param_dtype` if they are missing (tests/dist/test_precision.py).
- A unit sums gradients over microbatches in `unsharded_accumulated_grad` before it reduces them, if `reduce_dtype`
  differs from the dtype of gradients. Since torch 2.15 this is `.grad` of the gathered parameter
  (tests/dist/test_added.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.wgrad_fusion.linear import of_local

# `.grad` of the gathered parameter has the reduce dtype. Remove the other branch when torch >= 2.15 is the minimum.
_SUMS_IN_GRAD = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)


def copy_once(unit: FSDPModule) -> None:
    """Cast parameters and sum gradients of a unit on one rank in one pass instead of two."""
    for group in _groups(unit):
        for param in group.fsdp_params:
            # The objects exist already, and torch has no hook for their type.
            param.__class__ = _CastOnce
        unit.set_custom_reduce_scatter(_InPlace())


def _groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    return param_groups(fsdp_state(unit))


def fsdp_state(module: nn.Module | FSDPModule) -> FSDPState:
    """Return the private state that FSDP2 keeps for a unit."""
    state = _get_module_fsdp_state(cast(nn.Module, module))
    assert state is not None, "a unit of FSDP2"
    return state


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Return the parameter groups of an FSDP state. torch 2.12 has several per state, 2.11 at most one.

    Remove the second branch when torch >= 2.12 is the minimum.
    """
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def computing_in(units: Sequence[FSDPModule], dtype: torch.dtype) -> Iterator[None]:
    """Gather parameters and cast inputs of sharded units in `dtype` inside this context.

    Reshard all units before exit.
    """
    groups = [group for unit in units for group in _groups(unit)]
    policies: list[tuple[object, str, MixedPrecisionPolicy]]
    policies = [(state, "_mp_policy", state._mp_policy) for state in map(fsdp_state, units)]
    # A policy per parameter since torch 2.15. Remove the first case when torch >= 2.15 is the minimum.
    owners = [owner for group in groups for owner in ([group] if hasattr(group, "mp_policy") else group.fsdp_params)]
    policies += [(owner, "mp_policy", owner.mp_policy) for owner in owners]
    try:
        for owner, name, policy in policies:
            setattr(owner, name, dataclasses.replace(policy, param_dtype=dtype))
        _forget_gathered(groups)
        yield
    finally:
        for owner, name, policy in policies:
            setattr(owner, name, policy)
        _forget_gathered(groups)


def _forget_gathered(groups: Sequence[FSDPParamGroup]) -> None:
    """Free gathered parameters. The next gather allocates them in the dtype of the policy."""
    for group in groups:
        for param in group.fsdp_params:
            # Both names are caches: the flat buffer of a gather, and the parameter that views it.
            param.all_gather_outputs = []
            param.__dict__.pop("_unsharded_param", None)
        group._init_mp_dtypes()


def weight_sums(unit: FSDPModule) -> Iterator[tuple[nn.Module, str, UnreducedSum]]:
    """Yield module, name and gradient sum of every parameter that only one module of the unit owns."""
    for group in _groups(unit):
        for param in group.fsdp_params:
            if not param._module_info.shared_modules:
                yield param._module_info.module, param._module_info.param_name, UnreducedSum(group, param)


class UnreducedSum:
    """Sum over microbatches of the gradients of one parameter, in the reduce dtype. Implements `MainGrad`."""

    def __init__(self, group: FSDPParamGroup, param: FSDPParam):
        self._group, self._param = group, param

    def place(self, gradient_dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        param = self._param
        if param.reduce_dtype in (None, gradient_dtype):
            return None  # The sum has the dtype of the gradient.
        before = param.unsharded_accumulated_grad
        if before is not None and before.dtype == param.reduce_dtype:
            return _local(before), False
        if self._group.reduce_grads:
            return None  # Nothing is summed over microbatches.
        unsharded = param._unsharded_param
        # Uninitialized: the first GEMM writes with beta = 0. `True` tells the caller so.
        total = torch.empty_like(_local(unsharded), dtype=param.reduce_dtype, requires_grad=False)
        if _SUMS_IN_GRAD:
            unsharded.grad = of_local(total, unsharded)
        else:
            param.unsharded_accumulated_grad = of_local(total, unsharded)
        return total, True


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _CastOnce(FSDPParam):
    """Cast in the copy into the gathered parameter. torch casts into a temporary tensor and copies that."""

    def _is_plain(self) -> bool:
        in_shards = self.sharded_state == ShardedState.SHARDED
        return in_shards and not self.offload_to_cpu and not hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        return [self._sharded_param_data] if self._is_plain() else super().all_gather_inputs

    def init_all_gather_outputs(
        self, all_gather_input_numels: list[int], all_gather_input_dtypes: list[torch.dtype], *args: Any, **kwargs: Any
    ) -> None:
        dtypes = all_gather_input_dtypes
        if self._is_plain() and self.param_dtype is not None:
            dtypes = [self.param_dtype]
        super().init_all_gather_outputs(all_gather_input_numels, dtypes, *args, **kwargs)


class _InPlace(ReduceScatter):
    """On one rank, use the input buffer as output buffer."""

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # torch allocates an input buffer, then an output buffer of the same size. The second call returns the first
        # buffer.
        given, self._given = self._given, None
        if given is not None and (*given.shape, given.dtype) == (*size, dtype):
            return given
        self._given = torch.empty(*size, dtype=dtype, device=device)
        return self._given

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        assert output_tensor is input_tensor, "nothing is reduced on one rank"
