"""Seconds of a step from closed-form counts, on the simulated clocks of the dry run.

`layer_calls.py` counts the kernels of each layer, `memory.Accounting` the parameters that a rank holds. This module
puts them and their messages on a `Clock` in the order of the real step:

    forward    gather the next layer | kernels; tensor parallelism: gather, kernels, reduce; experts: exchange, kernels
    backward   gather | recompute, kernels of inputs and weights | reduce gradients in the last microbatch
    step       norm of gradients, optimizer

`|` is concurrent: only what the kernels do not hide is on the critical path. `step_time.py` makes a step of the spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from automodel_cli.distributed.activation_checkpointing.mode import is_recomputed
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.planning.hardware import Gpu, Links
from automodel_cli.planning.kernel import Kernel
from automodel_cli.planning.layer_calls import Call
from automodel_cli.planning.layer_costs import Unit
from automodel_cli.planning.memory import Accounting, state_rule
from automodel_cli.planning.rank_groups import Groups
from automodel_cli.planning.segments import Segment, Shard
from automodel_cli.planning.simulated_clock import Clock, Seconds, critical_path
from automodel_cli.planning.step_time import apart

_GRADIENT = 4
"""Bytes of an element of a gradient that is not reduced in another dtype."""
_WARM, _MEASURED = 2, 3
"""Microbatches of the two steps from which one more microbatch follows, as in a dry run."""


@dataclass(frozen=True)
class LayerTimes:
    """Times the stages of one model on one layout.

    Attributes:
        hidden: bytes of the hidden states of a microbatch on a rank.
        sequence_parallel: tensor parallelism gathers and scatters tokens, instead of summing all.
        ring: context parallelism passes keys around beside attention, instead of gathering them.
        reduces_every: gradients are reduced in every microbatch.
    """

    gpu: Gpu
    links: Links
    accounting: Accounting
    hidden: float
    checkpointing: bool | int | str
    sequence_parallel: bool
    ring: bool
    reduces_every: bool

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.accounting.layout)

    def layer(self, index: int, calls: Sequence[Call], unit: Unit, exchanged: float, keys: float) -> Segment:
        """Return a layer at this place of its stage."""
        tp = self.accounting.layout.tp
        if tp > 1:
            # Without sequence parallelism, about half of the other kernels (norms, residuals) see all tokens on each
            # rank.
            others = 1 / tp if self.sequence_parallel else (1 + 1 / tp) / 2
            calls = [call.scaled(1 / tp, others) for call in calls]
        again: Sequence[Call] = ()
        if is_recomputed(index, self.checkpointing):
            again = calls if self.checkpointing != "selective" else [c for c in calls if not c.is_product]
        return Segment(calls, again, [unit], self.shards([unit]), exchanged, keys / tp, is_layer=True)

    def end(self, calls: Sequence[Call], units: Sequence[Unit]) -> Segment:
        """Return what stands before or after the layers."""
        return Segment(calls, units=units, shards=self.shards(units))

    def shards(self, units: Sequence[Unit]) -> list[Shard]:
        """Return the parameters of an FSDP unit by group: experts have one of their own."""
        layout = self.accounting.layout
        found = []
        for is_expert, ranks in ((False, self.groups.shard), (True, self.groups.ep_shard)):
            items = [i for u in units for i in u.params if (layout.ep > 1 and is_experts(i.owner)) is is_expert]
            held = [(self.accounting.held_numel(i), i.param.requires_grad, i.param.dtype.itemsize) for i in items]
            if items:
                stored = sum(n * size for n, _, size in held) / sum(n for n, *_ in held)
                whole, trained = sum(n for n, *_ in held), sum(n for n, is_trained, _ in held if is_trained)
                found.append(Shard(ranks, whole, trained, stored, is_expert))
        return found

    def whole_step(self, segments: Sequence[Segment], number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds of (a step with one microbatch, one more microbatch), without a pipeline."""
        measured = min(_MEASURED, number)
        warm = min(_WARM, max(measured - 1, 1))
        return apart(self._step(segments, warm), self._step(segments, measured), warm, measured)

    def _step(self, segments: Sequence[Segment], number: int) -> Seconds:
        run, traits = _Run(self), self.accounting.storage
        for index in range(number):
            run.forward(segments, gathers=True)
            run.has_experts = traits.keeps_experts
            is_last = index == number - 1
            every = is_last or self.reduces_every
            run.backward(segments, gathers=True, reduces=every, experts=is_last or not traits.defers_experts)
        run.optimizer(segments)
        return critical_path(0.0, run.clock.now())

    def actions(self, segments: Sequence[Segment]) -> dict[str, dict[str, float]]:
        """Return seconds of a stage's forward F, and of its backward for inputs I and weights W."""
        found = {}
        for kind in ("F", "I", "W"):
            run = _Run(self)
            if kind == "F":
                run.forward(segments, gathers=False)
            else:
                run.backward(segments, gathers=False, reduces=False, of=("inputs" if kind == "I" else "weights",))
            found[kind] = critical_path(0.0, run.clock.at(0))
        return found

    def outside(self, stages: Sequence[Sequence[Segment]]) -> dict[str, float]:
        """Return seconds of a pipeline rank's step outside of its stages' actions."""
        run = _Run(self)
        for segment in (segment for stage in stages for segment in stage):
            run.gather(segment)
            run.reduce(segment)
        run.optimizer([segment for stage in stages for segment in stage])
        return critical_path(0.0, run.clock.now())

    def hop(self) -> float:
        """Return the seconds of hidden states to the next stage."""
        return self.links.seconds("send", self.hidden, self.groups.stages) if self.accounting.layout.pp > 1 else 0.0


class _Run:
    """A step in progress."""

    def __init__(self, times: LayerTimes):
        self.times, self.clock = times, Clock(times.gpu.rates)
        self._traits, self._groups = times.accounting.storage, times.groups
        self.has_experts = False
        """Whether experts stay gathered from now on."""

    def forward(self, segments: Sequence[Segment], *, gathers: bool) -> None:
        arrives = self.gather(segments[0]) if gathers else 0.0
        # Gather layer i + 1, then compute layer i: the gather is hidden if it takes less time than the layer.
        for segment, following in zip_longest(segments, segments[1:]):
            self.clock.wait(0, arrives)
            if gathers and following is not None:
                arrives = self.gather(following)
            self._segment(segment)

    def _segment(self, segment: Segment) -> None:
        """Messages of a layer, and the kernels of its forward."""
        awaited = self._tokens(segment)
        self._kernels(call.forward for call in segment.calls)
        self.clock.wait(0, awaited)

    def backward(
        self,
        segments: Sequence[Segment],
        *,
        gathers: bool,
        reduces: bool,
        experts: bool = True,
        of: Sequence[str] = ("inputs", "weights"),
    ) -> None:
        """Run backward. `experts`: reduce their gradients too, if gradients are reduced."""
        order = [segment for segment in reversed(segments) if segment.has_backward]
        arrives = 0.0
        for segment, following in zip_longest(order, order[1:]):
            self.clock.wait(0, arrives)
            if gathers and following is not None and following.is_layer:
                arrives = self.gather(following)
            if "inputs" in of:
                # Recomputation repeats collectives of tensor and context parallelism. Received tokens are saved.
                if segment.again:
                    awaited = self._tokens(segment, exchanges=2 if self.times.checkpointing == "minimal" else 0)
                    self._kernels(call.forward for call in segment.again)
                    self.clock.wait(0, awaited)
                awaited = self._tokens(segment, exchanges=1)
                self._kernels(segment.kernels("inputs"))
                self.clock.wait(0, awaited)
            # Token gradients return while weight gradients are computed.
            returned = 0.0
            if "inputs" in of:
                returned = self._message("alltoall", segment.exchanged, self._groups.ep, hidden=True)
            if "weights" in of:
                self._kernels(segment.kernels("weights"))
            self.clock.wait(0, returned)
            if reduces:
                self.reduce(segment, experts=experts)

    def _kernels(self, kernels: Iterable[Kernel]) -> None:
        for kernel in kernels:
            self.clock.kernel(*kernel.seconds(self.times.gpu), kernel.number)

    def _tokens(self, segment: Segment, *, exchanges: int = 2) -> float:
        """Messages of activations, of experts so many; returns when those end that kernels hide."""
        if not segment.is_layer:
            return 0.0
        for kind in ("all_gather", "reduce_scatter") if self.times.sequence_parallel else ("all_reduce",):
            for _ in range(2):  # around attention, and around the MLP
                self._message(kind, self.times.hidden, self._groups.tp)
        for _ in range(exchanges):  # tokens to experts, and results back
            self._message("alltoall", segment.exchanged, self._groups.ep)
        cp = self._groups.cp
        if self.times.ring:
            return self._message("send", segment.keys * (len(cp) - 1), cp, hidden=True)
        return self._message("all_gather", segment.keys * len(cp), cp)

    def _message(self, kind: str, size: float, ranks: Sequence[int], *, hidden: bool = False) -> float:
        if len(ranks) == 1 or not size:
            return 0.0
        links = self.times.links
        label = f"{ranks}"
        return self.clock.collective(label, links.kind(ranks), links.seconds(kind, size, ranks), asynchronous=hidden)

    def gather(self, segment: Segment) -> float:
        """Cast and gather parameters. Returns when they are there."""
        if "parameters" not in self._traits.shards:
            return 0.0
        arrives = 0.0
        for shard in segment.shards:
            if shard.is_expert and self.has_experts:
                continue
            size = shard.stored_bytes if self._traits.compute_dtype is None else self._traits.compute_dtype.itemsize
            held = shard.held / len(shard.ranks)
            copies = [Kernel("memory", 0.0, held * (shard.stored_bytes + size))]
            if len(shard.ranks) > 1:
                # FSDP copies the gathered buffer into the parameters: one read and one write.
                copies.append(Kernel("memory", 0.0, 2 * size * shard.held))
            self._kernels(copies)
            arrives = max(arrives, self._message("all_gather", size * shard.held, shard.ranks, hidden=True))
        return arrives

    def reduce(self, segment: Segment, *, experts: bool = True) -> None:
        """Sum gradients over ranks, beside what follows. `experts`: theirs too."""
        shards = "gradients" in self._traits.shards
        for shard in segment.shards:
            if shard.is_expert and not experts:
                continue
            size = shard.stored_bytes if self._traits.reduce_dtype is None else self._traits.reduce_dtype.itemsize
            whole = size * shard.trained
            if whole:
                self._kernels([Kernel("memory", 0.0, 2 * whole)])
            self._message("reduce_scatter" if shards else "all_reduce", whole, shard.ranks, hidden=True)
            if not shards or self._groups.layout.dp_replicate > 1:
                part = whole / len(shard.ranks)
                self._message("all_reduce", part, self._groups.replicate, hidden=True)

    def optimizer(self, segments: Sequence[Segment]) -> None:
        """Norm and scale of gradients, and the optimizer, on what a rank stores. It waits for the last reduction."""
        self.clock.wait(0, self.clock.now())
        accounting, moved = self.times.accounting, 0.0
        state_bytes = state_rule(accounting.optimizer)
        for item in (item for segment in segments for unit in segment.units for item in unit.params):
            if item.param.requires_grad:
                is_sharded = "optimizer" in self._traits.shards
                kept = accounting.stored_numel(item) if is_sharded else accounting.held_numel(item)
                # Gradients: norm, scale (read and written), read. The parameter and its states: read and written.
                moved += kept * (4 * _GRADIENT + 2 * item.param.dtype.itemsize) + 2 * state_bytes(item, kept)
        self._kernels([Kernel("memory", 0.0, moved)])
