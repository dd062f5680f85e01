"""Static memory of one GPU: parameters, gradients and optimizer states.

Exact arithmetic from shapes, dtypes and mesh, for what this program does; allocator rounding, fragmentation and
communication buffers are not counted, hence "estimate".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.distributed.strategies.base import MemoryTraits
from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.models.precision.nf4 import BYTES_PER_WEIGHT
from automodel_cli.planning.layer_costs import Unit
from automodel_cli.planning.reserve import MemoryBreakdown
from automodel_cli.training.optimizers.build import OptimizerNode, optimizer_node
from automodel_cli.training.optimizers.param_groups import TrainableParam


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU by kind; `host` is beside them, in the memory of the machine (CPU offload)."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    frozen: float = 0.0
    """Another model beside the one that trains: a teacher, or a copy that the policy is compared with."""
    head: float = 0.0
    """What the head computes with (`head_memory.py`), above the layer that is recomputed at other times."""
    host: float = 0.0
    early_gradients: float | None = None
    """Those that are there while the head computes, where that is not all of `gradients`."""
    reduced: float = 0.0
    """Of the largest layer's, which are reduced beside activations, when the head is done."""

    def beside(self, frozen: float, *, offloaded: bool) -> Memory:
        """With the parameters of another model, there where these are."""
        return replace(self, host=self.host + frozen) if offloaded else replace(self, frozen=frozen)

    @property
    def breakdown(self) -> MemoryBreakdown:
        kinds = ("parameters", "frozen", "gradients", "optimizer", "activations", "head")
        return MemoryBreakdown({kind: getattr(self, kind) for kind in kinds}, self.total)

    @property
    def total(self) -> float:
        """Parameters and optimizer beside the larger of two moments: the backward begins, with all activations; it
        ends, with all gradients. Where gradients add up over microbatches these are there at both."""
        if self.early_gradients is None:
            at_most = self.gradients + self.activations + self.head
        else:
            begins = self.early_gradients + self.activations + max(self.head, self.reduced)
            at_most = max(begins, self.gradients)
        return self.parameters + self.frozen + self.optimizer + at_most


@dataclass(frozen=True)
class Accounting:
    """How this program stores the parameters of a rank."""

    storage: MemoryTraits
    layout: Layout
    optimizer: OptimizerNode
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
        units, storage = [unit for stage in stages for unit in stage], self.storage
        items = [item for unit in units for item in unit.params]
        trained = [item for item in items if item.param.requires_grad]
        packed, stored = self.resident(units)
        grads = sum(self._kept(item, "gradients") * item.param.dtype.itemsize for item in trained)
        state_bytes = state_rule(self.optimizer)
        states = sum(state_bytes(item, self._kept(item, "optimizer")) for item in items)
        whole = self._gathered_parameters(units, num_outside) if "parameters" in storage.shards else 0.0
        if "gradients" in storage.shards:
            unsharded = self._unsharded_gradients(units)
        else:
            # A pipeline sums gradients without a wrapper and its buckets.
            unsharded = grads * (1 if self.layout.pp > 1 else storage.gradient_copies)
        if storage.offloaded:
            return Memory(packed + whole, unsharded, 0.0, host=stored + grads + states)
        memory = Memory(packed + stored + whole, max(unsharded, grads), states)
        if "gradients" not in storage.shards or self._adds_up:
            return memory
        layers = units[num_outside:]
        reduced = max((self._gathered([unit], storage.reduce_dtype, trained=True) for unit in layers), default=0.0)
        early = grads if self.num_microbatches > 1 else 0.0
        if self._experts_add_up:
            experts = [item for item in trained if is_experts(item.owner)]
            early -= sum(self._kept(item, "gradients") * item.param.dtype.itemsize for item in experts)
            early += self._experts_gradients(units)
        return replace(memory, early_gradients=early, reduced=reduced)

    def resident(self, units: Sequence[Unit]) -> tuple[float, float]:
        """Bytes of parameters between steps: of those in 4 bits, which are whole on every rank, and of all others."""
        kept = (self._kept(item, "parameters") * item.param.dtype.itemsize for unit in units for item in unit.params)
        return sum(unit.num_packed for unit in units) * BYTES_PER_WEIGHT, sum(kept)

    @property
    def _adds_up(self) -> bool:
        """Whether gradients of several microbatches are summed before they are reduced."""
        return self.storage.defers and (self.layout.pp > 1 or self.num_microbatches > 1)

    @property
    def _experts_add_up(self) -> bool:
        return self.storage.defers_experts and (self.layout.pp > 1 or self.num_microbatches > 1)

    def _kept(self, item: TrainableParam, kind: str) -> int:
        """Elements of a parameter, its gradient or its optimizer state that a rank keeps between steps."""
        return self.stored_numel(item) if kind in self.storage.shards else self.held_numel(item)

    def _gathered(self, chosen: Sequence[Unit], dtype: torch.dtype | None, *, trained: bool = False) -> float:
        items = [item for unit in chosen for item in unit.params if item.param.requires_grad or not trained]
        return sum(self.held_numel(item) * (dtype or item.param.dtype).itemsize for item in items)

    def _gathered_parameters(self, units: Sequence[Unit], num_outside: int) -> float:
        """Under a pipeline a stage stays gathered for the whole step; otherwise the root group and the last layer do,
        experts where they are kept, and two more layers are in flight."""
        dtype = self.storage.compute_dtype
        if self.layout.pp > 1:
            return self._gathered(units, dtype)
        outside, layers = units[:num_outside], units[num_outside:]
        kept = 0.0
        if self.storage.keeps_experts and self.layout.ep > 1:
            kept = self._gathered([_part(unit, is_experts) for unit in layers], dtype)
            layers = [_part(unit, lambda owner: not is_experts(owner)) for unit in layers]
        # The two largest: one that computes and one that is prefetched.
        by_size = sorted((self._gathered([unit], dtype) for unit in layers[:-1]), reverse=True)
        return self._gathered([*outside, *layers[-1:]], dtype) + sum(by_size[:2]) + kept

    def _unsharded_gradients(self, units: Sequence[Unit]) -> float:
        """Gradients that are reduced once per step add up unsharded until then."""
        dtype = self.storage.reduce_dtype
        if self._adds_up:
            return self._gathered(units, dtype, trained=True)
        if self._experts_add_up:
            others = [_part(unit, lambda owner: not is_experts(owner)) for unit in units]
            largest = max((self._gathered([unit], dtype, trained=True) for unit in others), default=0.0)
            return self._experts_gradients(units) + largest
        return max((self._gathered([unit], dtype, trained=True) for unit in units), default=0.0)

    def _experts_gradients(self, units: Sequence[Unit]) -> float:
        """Those that add up unsharded if their reduction alone is deferred."""
        return self._gathered([_part(unit, is_experts) for unit in units], self.storage.reduce_dtype, trained=True)


def _part(unit: Unit, chosen: Callable[[nn.Module], bool]) -> Unit:
    return replace(unit, params=tuple(item for item in unit.params if chosen(item.owner)))


# 10 rows on 4 ranks: 3, 3, 3 and 1.
def sharded_rows(rows: int, shards: int) -> int:
    """Rows on the first rank, which has the most: FSDP2 cuts the first dim into equal chunks, rounded up."""
    return -(-rows // shards)


def state_rule(optimizer: object) -> Callable[[TrainableParam, int], float]:
    """What an optimizer keeps of one parameter, in bytes, of which this rank has a number of elements; nothing of a
    frozen one. A node that does not say it is seen after one step on a small matrix.
    """
    node = optimizer_node(optimizer)
    rule = getattr(node, "state_bytes", None)
    per_element = 0.0 if rule is not None else _measured_state(node)

    def state_bytes(item: TrainableParam, numel: int) -> float:
        if not item.param.requires_grad:
            return 0.0
        return rule(item, numel) if rule is not None else per_element * item.param.dtype.itemsize * numel

    return state_bytes


def _measured_state(node: OptimizerNode) -> float:
    """State elements per parameter element."""
    layer = nn.Linear(64, 64, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer = node.build([layer])
    optimizer.step()
    return sum(state.numel() for state in tensors_in(optimizer.state[layer.weight]) if state.ndim) / 64**2
