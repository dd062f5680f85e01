"""A plan as text for the terminal and its timeline as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automodel_cli.pipelining.timeline.simulator import Timeline
from automodel_cli.pipelining.timeline.svg import draw_svg, draw_text
from automodel_cli.planning.plan import Plan, StageRow
from automodel_cli.planning.reserve import RESERVE_GIB, usable_bytes
from automodel_cli.planning.schedule_comparison import Comparison

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class TracedMemory:
    """What a dry run of one pipeline rank held at its peak, in bytes."""

    rank: int
    by_kind: Mapping[str, float]

    @property
    def peak(self) -> float:
        return sum(self.by_kind.values())


def render_plan(plan: Plan, *, memory_gib: float, traced: Sequence[TracedMemory] = (), width: int = 120) -> str:
    """Everything that `automodel plan` prints. `traced`: memory of every pipeline rank, instead of the estimate."""
    memory = _traced(plan, traced, memory_gib) if traced else _memory(plan, memory_gib)
    blocks = [_head(plan), _stages(plan), memory]
    if plan.layout_table is not None:
        blocks.insert(1, plan.layout_table)
    if plan.timeline is not None:
        unit = "time 1: the forward of a microbatch through a rank's mean share of the weights"
        blocks.append("\n".join([_timeline(plan.timeline, width), unit, *_balance_hint(plan)]))
        blocks.append(_comparison(plan))
    return "\n\n".join(blocks)


def _timeline(timeline: Timeline, width: int) -> str:
    """The drawing, or its headline where a typical action would be narrower than a character."""
    drawn = draw_text(timeline, width=width)
    lengths = sorted(span.end - span.start for rank in timeline.spans for span in rank if span.end > span.start)
    if timeline.makespan / lengths[len(lengths) // 2] <= width:
        return drawn
    return f"{drawn.splitlines()[0]}\ntoo many actions for {width} columns: draw them with --svg FILE"


def _balance_hint(plan: Plan) -> list[str]:
    """Where another cut of the same schedule waits less."""
    if plan.timeline is None or plan.balanced is None or plan.balanced.makespan > 0.99 * plan.timeline.makespan:
        return []
    share = f"idle {plan.balanced.idle_fraction:.1%}, makespan {plan.balanced.makespan:.4g}"
    return [f"the head weighs as much as layers: with pipeline.balance=cost {share}"]


def svg(plan: Plan) -> str:
    """The timeline of a pipeline."""
    assert plan.timeline is not None, "only a pipeline has a timeline"
    return draw_svg(plan.timeline, title=f"{plan.timeline.program.schedule}: {_shape(plan)}")


def _shape(plan: Plan) -> str:
    request = plan.request
    count = request.num_microbatches
    return f"{count} microbatch{'es' * (count > 1)} of {request.rows} x {request.seq_len} tokens"


def _head(plan: Plan) -> str:
    request = plan.request
    model = request.model.pretrained or request.model.gguf_file or (request.model.config or {})["model_type"]
    strategy = type(request.parallelizer).__name__.removesuffix("Config").lower()
    trained = "" if plan.num_trained == plan.num_parameters else f", {plan.num_trained:,} trained"
    count = request.layout.world_size
    return "\n".join(
        [
            f"model     {model}: {plan.num_parameters:,} parameters{trained}",
            f"layout    {count} GPU{'s' * (count > 1)}, {strategy}: {request.layout}",
            f"step      {_shape(plan)} on each data-parallel rank",
        ]
    )


def _stages(plan: Plan) -> str:
    unit, name = _unit(plan)
    rows = [["stage", "rank", "holds", "parameters", f"activations of a microbatch [{name}]"]]
    for row in plan.stages:
        amount = f"{row.activations / unit:,.2f}"
        rows.append([str(row.index), str(row.rank), _holds(row), f"{row.num_parameters:,}", amount])
    return _table(rows, left={2})


def _holds(row: StageRow) -> str:
    held = ["embedding"] if row.is_first else []
    if row.layers:
        first, last = row.layers.start, row.layers.stop - 1
        held.append(f"layer {first}" if first == last else f"layers {first}-{last}")
    if row.num_depths:
        held.append(f"{row.num_depths} MTP layer{'s' * (row.num_depths > 1)}")
    held += ["head"] if row.is_last else []
    return ", ".join(held) or "nothing: passes on"


def _memory(plan: Plan, memory_gib: float) -> str:
    unit, name = _unit(plan)
    kinds = ["parameters", "gradients", "optimizer", "activations", "head", "total"]
    if any(memory.frozen for memory in plan.memory):
        kinds.insert(1, "frozen")
    offloaded = any(memory.host for memory in plan.memory)
    rows = [["rank", *kinds, f"of {memory_gib:g} GiB", "live microbatches", *(["in host memory"] if offloaded else [])]]
    for rank, memory in enumerate(plan.memory):
        parts = [getattr(memory, kind) for kind in kinds]
        share = f"{memory.total / (memory_gib * _GIB):.0%}"
        host = [f"{memory.host / unit:,.2f}"] if offloaded else []
        rows.append([str(rank), *(f"{part / unit:,.2f}" for part in parts), share, f"{plan.live[rank]:g}", *host])
    return "\n".join([f"memory of a GPU [{name}]: estimate, uncalibrated", _table(rows), _verdict(plan, memory_gib)])


def _traced(plan: Plan, traced: Sequence[TracedMemory], memory_gib: float) -> str:
    """Kinds from top to bottom, pipeline ranks from left to right."""
    unit, name = _unit(plan)
    kinds = sorted({k for one in traced for k in one.by_kind}, key=lambda k: -max(t.by_kind.get(k, 0) for t in traced))
    shown = [k for k in kinds if max(one.by_kind.get(k, 0) for one in traced) >= 0.005 * unit]
    rows = [["pipeline rank", *(str(one.rank) for one in traced)]]
    rows += [[kind, *(f"{one.by_kind.get(kind, 0) / unit:,.2f}" for one in traced)] for kind in shown]
    rows.append(["peak", *(f"{one.peak / unit:,.2f}" for one in traced)])
    rows.append(["estimate without a dry run", *(f"{plan.memory[one.rank].total / unit:,.2f}" for one in traced)])
    heaviest = max(traced, key=lambda one: one.peak)
    fits = "fits" if heaviest.peak <= usable_bytes(memory_gib) else "does not fit"
    aside = f"{heaviest.peak / unit:,.1f} {name} {_set_aside(memory_gib)}"
    return "\n".join([f"memory of a GPU [{name}]: a dry run of each rank", _table(rows, left={0}), f"{fits}: {aside}"])


def _verdict(plan: Plan, memory_gib: float) -> str:
    limit, rows, (unit, name) = usable_bytes(memory_gib), plan.request.rows, _unit(plan)
    needed = f"{plan.heaviest / unit:,.1f} {name} {_set_aside(memory_gib)}"
    largest = plan.largest_microbatch(limit)
    room = f"microbatch_size={largest} is the largest that does" if largest else "not even one row a microbatch does"
    if plan.heaviest > limit:
        return f"does not fit: {needed}; {room}"
    more = f"; so does up to microbatch_size={largest}" if largest > rows else ""
    return f"fits: {needed}{more}"


def _set_aside(memory_gib: float) -> str:
    return f"and {RESERVE_GIB:g} GiB set aside, of {memory_gib:g} GiB"


def _comparison(plan: Plan) -> str:
    """The table of the simulator, and the heaviest GPU of each schedule beside it."""
    unit, name = _unit(plan)
    lines = _schedule_rows([row for row, _ in plan.comparison]).splitlines()
    column = max(len(line) for line, w in zip(lines[1:], _weights(plan), strict=True) if w is not None)
    column = max(column, len(lines[0]))
    text = [f"{lines[0]:<{column}}  heaviest GPU [{name}]"]
    for line, weight in zip(lines[1:], _weights(plan), strict=True):
        text.append(line if weight is None else f"{line:<{column}}  {weight / unit:>18,.2f}")
    own = plan.timeline.program.schedule if plan.timeline else ""
    marked = [f"{'>' if line.split()[0] == own else ' '} {line}" for line in text]
    return "\n".join(["every schedule on these ranks (stages as configured where their number is the same)", *marked])


def _weights(plan: Plan) -> list[float | None]:
    return [weight for _, weight in plan.comparison]


def _unit(plan: Plan) -> tuple[int, str]:
    return (_GIB, "GiB") if plan.heaviest >= _GIB else (_MIB, "MiB")


def _table(rows: Sequence[Sequence[str]], left: set[int] | None = None) -> str:
    """Columns as wide as their longest cell; numbers to the right, the columns in `left` to the left."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            x.ljust(w) if c in (left or ()) else x.rjust(w) for c, (x, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _schedule_rows(rows: Sequence[Comparison]) -> str:
    """The comparison as a text table: stages per rank, idle fraction, efficiency, largest activation peak."""
    lines = [
        f"{'schedule':<22} {'stages/rank':>11} {'time':>9} {'idle':>7} {'efficiency':>10}  peak activations per rank"
    ]
    for row in rows:
        if row.timeline is None:
            lines.append(f"{row.schedule.name:<22} {row.num_chunks:>11} refused: {row.refusal}")
            continue
        t = row.timeline
        peaks = t.peak_activations
        peak = f"{peaks[0]:g} on every rank" if len(set(peaks)) == 1 else f"{max(peaks):g} to {min(peaks):g}"
        share = f"{t.efficiency:.1%}" if t.efficiency is not None else "-"
        numbers = f"{t.makespan:>9.4g} {t.idle_fraction:>7.1%} {share:>10}  {peak}"
        lines.append(f"{row.schedule.name:<22} {row.num_chunks:>11} {numbers}")
    return "\n".join(lines)
