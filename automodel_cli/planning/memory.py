"""Bytes on one GPU that do not depend on the microbatch: parameters, gradients, optimizer states.

Exact arithmetic from shapes, dtypes and mesh, for what this program does; allocator rounding, fragmentation and
communication buffers are not counted, hence "estimate".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import FSDP2Config, ParallelizerConfig
from automodel_cli.distributed.expert_parallel import is_experts
from automodel_cli.distributed.layout import Layout
from automodel_cli.models.nf4 import BYTES_PER_WEIGHT
from automodel_cli.planning.units import Unit
from automodel_cli.training.optim import AdamW, AdamW8bit, Muon
from automodel_cli.training.param_groups import TrainableParam

_FLOAT = torch.float32.itemsize
_8BIT_BLOCK, _8BIT_MIN = 256, 4096  # values that share a scale; smaller tensors keep ordinary moments


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU by kind; `host` is beside them, in the memory of the machine (CPU offload)."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All kinds at once, which is more than any moment needs: gradients and activations peak at other times."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Accounting:
    """How this program stores the parameters of a rank."""

    parallelizer: ParallelizerConfig
    layout: Layout
    optimizer: Any
    num_microbatches: int
    over_tp: frozenset[nn.Parameter] = frozenset()
    """Parameters that tensor parallelism cuts."""

    def held_numel(self, item: TrainableParam) -> int:
        """Elements that a rank computes with: its experts, its tensor shard, or all; FSDP2 gathers as many."""
        return item.param.numel() // self._model_shards(item)

    def stored_numel(self, item: TrainableParam) -> int:
        """Elements that a rank keeps between steps. Experts of one rank of `ep` are sharded over `ep_shard`."""
        distributed = self.layout.ep > 1 and is_experts(item.owner)
        fsdp_shards = self.layout.ep_shard if distributed else self.layout.dp_shard_cp
        rows = item.param.shape[0] if item.param.ndim else 1
        own_rows = -(-rows // self._model_shards(item))
        return sharded_rows(own_rows, fsdp_shards) * (item.param.numel() // rows) if rows else 0

    def _model_shards(self, item: TrainableParam) -> int:
        if self.layout.ep > 1 and is_experts(item.owner):
            return self.layout.ep
        return self.layout.tp if item.param in self.over_tp else 1

    def rank_memory(self, stages: Sequence[Sequence[Unit]], num_outside: int = 1) -> Memory:
        """Of a rank that holds these stages. Without a pipeline, the first `num_outside` units are the root group."""
        units = [unit for stage in stages for unit in stage]
        packed = sum(unit.num_packed for unit in units) * BYTES_PER_WEIGHT  # whole on every rank
        if isinstance(self.parallelizer, FSDP2Config):
            memory = self._fsdp2(units, num_outside, self.parallelizer)
            return dataclasses.replace(memory, parameters=memory.parameters + packed)
        stored = packed + sum(_bytes(item) for unit in units for item in unit.params)
        grads = sum(_bytes(item) for unit in units for item in unit.params if item.param.requires_grad)
        states = sum(optimizer_bytes(self.optimizer, item, item.param.numel()) for u in units for item in u.params)
        # The wrapper's buckets are a second copy of the gradients; a pipeline sums them without the wrapper.
        in_buckets = self.layout.pp > 1 or self.parallelizer.to_dict()["gradient_as_bucket_view"]
        return Memory(stored, grads if in_buckets else 2 * grads, states)

    def _fsdp2(self, units: Sequence[Unit], num_outside: int, config: FSDP2Config) -> Memory:
        """Shards of everything, and what is gathered.

        Under a pipeline a stage stays gathered for the whole step; otherwise the root group and the last layer do, and
        two more layers are in flight. Gradients that are reduced once per step add up unsharded until then.
        """
        policy = config.build_mp_policy()

        def gathered(chosen: Sequence[Unit], dtype: torch.dtype | None, *, trained: bool = False) -> float:
            items = [item for unit in chosen for item in unit.params if item.param.requires_grad or not trained]
            return sum(self.held_numel(item) * (dtype or item.param.dtype).itemsize for item in items)

        items = [item for unit in units for item in unit.params]
        sharded = sum(self.stored_numel(item) * item.param.dtype.itemsize for item in items)
        grads = sum(self.stored_numel(i) * i.param.dtype.itemsize for i in items if i.param.requires_grad)
        states = sum(optimizer_bytes(self.optimizer, item, self.stored_numel(item)) for item in items)
        outside, layers = units[:num_outside], units[num_outside:]
        by_size = sorted((gathered([unit], policy.param_dtype) for unit in layers[:-1]), reverse=True)
        if self.layout.pp > 1:
            whole = gathered(units, policy.param_dtype)
        else:
            whole = gathered([*outside, *layers[-1:]], policy.param_dtype) + sum(by_size[:2])
        reduced = policy.reduce_dtype or policy.param_dtype
        if config.defer_fsdp_grad_sync and (self.layout.pp > 1 or self.num_microbatches > 1):
            unsharded = gathered(units, reduced, trained=True)
        else:
            unsharded = max((gathered([unit], reduced, trained=True) for unit in units), default=0.0)
        if config.offload_policy is not None:
            return Memory(whole, unsharded, 0.0, host=sharded + grads + states)
        return Memory(sharded + whole, max(unsharded, grads), states)


def sharded_rows(rows: int, shards: int) -> int:
    """Rows on the first rank, which has the most: FSDP2 cuts the first dim into equal chunks, rounded up."""
    return -(-rows // shards)


def optimizer_bytes(node: Any, item: TrainableParam, numel: int) -> float:
    """State of one parameter of which this rank has `numel` elements; none for a frozen one."""
    if not item.param.requires_grad:
        return 0.0
    size = item.param.dtype.itemsize
    if isinstance(node, Muon):
        return (1 if node.orthogonalises(item) else 2) * size * numel
    if isinstance(node, AdamW8bit):
        scales = _FLOAT * numel / _8BIT_BLOCK
        return 2 * (numel + scales) if numel >= _8BIT_MIN else 2.0 * size * numel
    if isinstance(node, AdamW):
        return 2.0 * size * numel
    if isinstance(node, functools.partial):
        return _measured_state(node) * size * numel
    raise ConfigError(f"no rule for the states of {type(node).__name__}", keys=("optimizer",), fix="optimizer=adamw")


@functools.lru_cache
def _measured_state(partial: functools.partial[torch.optim.Optimizer]) -> float:
    """State elements per parameter element of any torch optimizer, seen after one step on a small matrix."""
    param = nn.Parameter(torch.zeros(64, 64))
    param.grad = torch.zeros_like(param)
    optimizer = partial([param])
    optimizer.step()
    tensors = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(tensor.numel() for tensor in tensors) / param.numel()


def _bytes(item: TrainableParam) -> int:
    return item.param.numel() * item.param.dtype.itemsize
