"""Plan of a run: layers, memory and idle time of each rank. Needs no weights and no process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from automodel_cli.distributed.compile_modes import AUTO, FUSED_OPS
from automodel_cli.distributed.tensor_parallel.apply import cut_parameters
from automodel_cli.models.builder import build_part
from automodel_cli.models.freezing import freeze
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision.nf4 import num_packed
from automodel_cli.models.vision.work import FrontWork
from automodel_cli.pipelining.cut.placement import place_layout, render_table
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.cut.stage_plan import StagePlan, plan_stages
from automodel_cli.pipelining.error_keys import as_yaml
from automodel_cli.pipelining.schedule.program import Program
from automodel_cli.pipelining.timeline.simulator import Timeline, peak_activations
from automodel_cli.planning.activation_memory import Activations, trace_activations
from automodel_cli.planning.head_memory import head_shape, planned_head_bytes, sums_in_float32
from automodel_cli.planning.layer_costs import Units, read_units
from automodel_cli.planning.memory import Accounting, Memory
from automodel_cli.planning.request import PlanRequest
from automodel_cli.planning.schedule_comparison import Comparison, StagePlanner
from automodel_cli.planning.step_time import StepTime
from automodel_cli.planning.time_estimate import TimeEstimate, time_estimate
from automodel_cli.planning.tower_memory import TowerMemory, tower_memory


@dataclass(frozen=True)
class StageRow:
    """One stage. `activations` is what one microbatch keeps alive on it, in bytes."""

    index: int
    rank: int
    layers: range
    is_first: bool
    is_last: bool
    num_parameters: int
    activations: float
    num_depths: int = 0
    """Layers for multi-token prediction."""


@dataclass(frozen=True)
class Plan:
    """`memory[r]` is one GPU of pipeline rank r, `live[r]` the microbatches it keeps at once at the worst moment.

    `cut`, `comparison` and `layout_table` exist for pipelines only (the last for a layout); `balanced` is the timeline
    that `pipeline.balance=cost` would have, where the layers are spread evenly now.
    """

    request: PlanRequest
    num_parameters: int
    num_trained: int
    stages: tuple[StageRow, ...]
    memory: tuple[Memory, ...]
    live: tuple[float, ...]
    time: StepTime
    times: TimeEstimate
    """Times this model on other layouts."""
    cut: StagePlan | None = None
    comparison: tuple[tuple[Comparison, float | None], ...] = ()
    layout_table: str | None = None
    balanced: Timeline | None = None
    tower: TowerMemory | None = None

    @property
    def timeline(self) -> Timeline | None:
        return self.time.timeline

    @property
    def heaviest(self) -> float:
        return max(memory.total for memory in self.memory)

    def largest_microbatch(self, limit: float) -> int:
        """Rows of the largest microbatch whose heaviest GPU stays within `limit` bytes; 0 when none does."""
        rows = [
            (limit - memory.total + memory.activations) / (memory.activations / self.request.rows)
            for memory in self.memory
            if memory.activations
        ]
        return max(0, int(min(rows)))


def make_plan(request: PlanRequest) -> Plan:
    """Raises ConfigError for what a run with this config would refuse."""
    with as_yaml():
        return _make_plan(request)


def _make_plan(request: PlanRequest) -> Plan:
    part = build_part(request.model)
    freeze(part, request.selection)
    anatomy = check_split(part.model) if request.pipeline is not None else None
    units = read_units(part, anatomy)
    checkpointing = request.parallelizer.activation_checkpointing
    tokens = request.tokens
    activations = trace_activations(
        part,
        request.compute_dtype,
        checkpointing,
        rows=request.rows,
        seq_len=tokens,
        ep=request.layout.ep,
        masks=request.masks,
        fuses_operations=request.parallelizer.enable_compile in (AUTO, FUSED_OPS),  # what is planned is for GPUs
        document=min(request.document or request.seq_len, request.seq_len),
        bits=8 if request.model.fp8 is not None else 16,
        adds=sums_in_float32(request),
    )
    if request.parallelizer.axis_options().sequence_parallel:
        activations = activations.sharded_over_tokens(request.layout.tp)
    tower = _tower(request, part, tokens)
    activations = activations if tower is None else tower.beside(activations)
    over_tp = _cut_over_tp(request, part)
    heads = [planned_head_bytes(request, part, over_tp, request.rows * tokens, adds=adds) for adds in (False, True)]
    estimate = _Estimate(request, units, activations, over_tp, _frozen_bytes(request), *heads)
    whole = {id(p): p for p in part.parameters()}.values()
    num_trained = sum(p.numel() for p in whole if p.requires_grad)
    times = time_estimate(request, part, units, activations, over_tp, head_shape(request, part, over_tp), num_trained)
    every_stage = estimate.of_stages((range(len(units.layers)),), (0,), lambda amounts: tuple(amounts), (1,))
    number = sum(p.numel() for p in whole) + num_packed(part)
    plan = Plan(request, number, num_trained, *every_stage, live=(1.0,), time=times.whole(), times=times, tower=tower)
    if anatomy is None:
        return plan
    cutter = StagePlanner(part, anatomy, times.costs, request.layout.pp, request.num_microbatches)
    return _with_pipeline(plan, estimate, cutter, times)


def _tower(request: PlanRequest, part: ModelPart, tokens: int) -> TowerMemory | None:
    """Memory of the vision tower if all tokens of a microbatch are image tokens."""
    vision = request.model.vision
    if part.front is None or vision is None:
        return None
    image_tokens = request.rows * tokens
    return tower_memory(
        FrontWork.of(part.front),
        request.parallelizer.activation_checkpointing,
        patches=image_tokens * request.patches_per_image_token,
        image_tokens=image_tokens,
        text_width=part.model.config.get_text_config().hidden_size,
        item_bytes=request.compute_dtype.itemsize,
        is_trained=not vision.front_is_frozen,
    )


def _with_pipeline(plan: Plan, estimate: _Estimate, cutter: StagePlanner, times: TimeEstimate) -> Plan:
    config = plan.request.stages
    cut = cutter.stage_plan(config)
    timeline = cutter.timeline(cut)
    stages, memory = estimate.of_plan(cut, timeline.program)
    compared = []
    for row, other in cutter.compare(config):
        weight = None
        if row.timeline is not None and other is not None:
            weight = max(m.total for m in estimate.of_plan(other, row.timeline.program)[1])
        compared.append((row, weight))
    table = None
    if config.layout is not None and (config.named_schedule is None or config.named_schedule.style == "loop"):
        table = render_table(place_layout(config.layout, cut.pp_size))
    return replace(
        plan,
        stages=stages,
        memory=memory,
        live=timeline.peak_activations,
        cut=cut,
        time=times.with_pipeline(cut),
        comparison=tuple(compared),
        layout_table=table,
        balanced=cutter.balanced(config),
    )


def _cut_over_tp(request: PlanRequest, part: ModelPart) -> frozenset[nn.Parameter]:
    layout, parallelizer = request.layout, request.parallelizer
    if layout.tp == 1:
        return frozenset()
    return frozenset(cut_parameters(part.model, parallelizer.axis_options(), layout.tp, shard_experts=layout.ep == 1))


def _frozen_bytes(request: PlanRequest) -> tuple[float, ...]:
    """Bytes of the frozen model that each pipeline rank keeps. Its own passes are over when a step begins, and what
    they gathered is sharded again."""
    layout = request.layout
    if request.frozen is None:
        return (0.0,) * layout.pp
    part = build_part(request.frozen)
    accounting = Accounting(
        request.parallelizer.storage(), layout, request.optimizer, request.num_microbatches, _cut_over_tp(request, part)
    )
    if request.pipeline is None:
        units = read_units(part, None)
        return (sum(accounting.resident(units.of_stage(range(len(units.layers)), is_first=True, is_last=True))),)
    anatomy = check_split(part.model)
    units, cut = read_units(part, anatomy), plan_stages(request.stages, part, anatomy, layout.pp)
    sizes = [0.0] * layout.pp
    for stage, layers in enumerate(cut.layers):
        ends = {"is_first": stage == 0, "is_last": stage == cut.num_stages - 1}
        sizes[cut.owner[stage]] += sum(accounting.resident(units.of_stage(layers, **ends)))
    return tuple(sizes)


@dataclass(frozen=True)
class _Estimate:
    request: PlanRequest
    units: Units
    activations: Activations
    over_tp: frozenset[nn.Parameter]
    frozen: tuple[float, ...]
    head_alone: float
    head: float
    """Of a program whose backwards are whole, where it may add to the sum over microbatches."""

    def of_plan(self, plan: StagePlan, program: Program) -> tuple[tuple[StageRow, ...], tuple[Memory, ...]]:
        roles = [plan.role_of_depths(stage) for stage in range(plan.num_stages)]
        if program.splits_backward and self.head != self.head_alone:
            return replace(self, head=self.head_alone).of_plan(plan, program)
        return self.of_stages(plan.layers, plan.owner, lambda amounts: peak_activations(program, amounts), roles)

    def of_stages(
        self,
        layers: Sequence[range],
        owner: Sequence[int],
        peaks: Callable[[Sequence[float]], tuple[float, ...]],
        depths: Sequence[int],
    ) -> tuple[tuple[StageRow, ...], tuple[Memory, ...]]:
        """Rows of the stages, and the memory of each rank; `peaks` adds up what is alive of one microbatch a
        stage. `depths[s]` is `StagePlan.role_of_depths` of a stage."""
        request, last = self.request, len(layers) - 1
        ends = [{"is_first": s == 0, "is_last": s == last} for s in range(len(layers))]
        held = [self.units.of_stage(r, **ends[s], depths=depths[s]) for s, r in enumerate(layers)]
        amounts = [self.activations.of_stage(r, **ends[s], holds_depths=depths[s] == 1) for s, r in enumerate(layers)]
        num_depths = self.units.num_depths
        rows = tuple(
            StageRow(
                s,
                owner[s],
                r,
                s == 0,
                s == last,
                sum(unit.num_parameters for unit in held[s]),
                amounts[s],
                num_depths if depths[s] == 1 else 0,
            )
            for s, r in enumerate(layers)
        )
        accounting = Accounting(
            request.parallelizer.storage(), request.layout, request.optimizer, request.num_microbatches, self.over_tp
        )
        memory = []
        for rank, peak in enumerate(peaks(amounts)):
            own = [units for units, owned_by in zip(held, owner, strict=True) if owned_by == rank]
            recomputed = self.activations.recomputed
            head = max(0.0, self.head - recomputed) if owner[last] == rank else 0.0
            of_rank = replace(accounting.rank_memory(own), activations=peak + recomputed, head=head)
            memory.append(of_rank.beside(self.frozen[rank], offloaded=accounting.storage.offloaded))
        return rows, tuple(memory)
