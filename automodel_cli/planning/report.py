"""A plan as text for the terminal and its timeline as SVG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from automodel_cli.pipelining.timeline.simulator import Timeline
from automodel_cli.pipelining.timeline.svg import draw_svg, draw_text
from automodel_cli.planning.plan import Plan, StageRow
from automodel_cli.planning.reserve import MARGIN, RESERVE_GIB, MemoryBreakdown, usable_bytes
from automodel_cli.planning.schedule_comparison import Comparison
from automodel_cli.planning.simulated_clock import Seconds
from automodel_cli.planning.step_time import StepTime, total
from automodel_cli.planning.time_estimate import TIME_MARGIN

_GIB, _MIB = 2**30, 2**20


def render_plan(plan: Plan, *, memory_gib: float, traced: Sequence[MemoryBreakdown] = (), width: int = 120) -> str:
    """Everything that `automodel plan` prints. `traced`: memory of every pipeline rank, instead of the estimate."""
    blocks = [_head(plan), _stages(plan), _memory(plan, traced, memory_gib), "\n".join(_time(plan))]
    if plan.layout_table is not None:
        blocks.insert(1, plan.layout_table)
    if plan.timeline is not None:
        blocks.append("\n".join([_timeline(plan.timeline, width), *_balance_hint(plan)]))
        blocks.append(_comparison(plan))
    return "\n\n".join(blocks)


def _time(plan: Plan) -> list[str]:
    return [
        f"time on {plan.time.gpu.name}: estimate, to {TIME_MARGIN:.0%} of a dry run",
        render_rate(plan.time),
        *render_shares(plan.time.seconds, width=100),
    ]


def render_rate(time: StepTime) -> str:
    """How fast a step would be."""
    step, tokens, mfu = time.step_range, time.throughput, time.mfu
    unknown = "unknown (the model's FLOPs are not counted)"
    share = unknown if mfu is None else f"{spread(100 * mfu.low, 100 * mfu.high)}%"
    return f"step {spread(step.low, step.high)} s, {spread(tokens.low, tokens.high)} tokens/s/GPU, MFU {share}"


def spread(low: float, high: float) -> str:
    """A range, rounded to two digits of its width."""
    places = 1 - math.floor(math.log10(high - low)) if high > low else 2
    return " to ".join(f"{round(x, places):,.{max(places, 0)}f}" for x in (low, high))


_COSTS = {
    "gemm": "GEMMs", "gemm_fp8": "float8 GEMMs", "grouped": "grouped GEMMs", "attention": "attention",
    "memory": "memory-bound kernels", "node": "exposed communication in a node",
    "network": "exposed communication between nodes", "interference": "slowdown beside communication",
    "copy": "copies to and from the host", "host": "waiting for the host",
}  # fmt: skip


def render_shares(seconds: Seconds, width: int = 0) -> list[str]:
    """Return what a step's time consists of, in lines of `width` columns, or in one line."""
    whole = total(seconds)
    shares = sorted(((part / whole, kind) for kind, part in seconds.items()), reverse=True)
    text = "of the step: " + ", ".join(f"{_COSTS[kind]} {share:.0%}" for share, kind in shares if share >= 0.005)
    return textwrap.wrap(text, width, subsequent_indent="  ") if width else [text]


def _timeline(timeline: Timeline, width: int) -> str:
    """The drawing, or its headline where a typical action would be narrower than a character."""
    drawn = draw_text(timeline, width=width, unit="s")
    lengths = sorted(span.end - span.start for rank in timeline.spans for span in rank if span.end > span.start)
    if timeline.makespan / lengths[len(lengths) // 2] <= width:
        return drawn
    return f"{drawn.splitlines()[0]}\ntoo many actions for {width} columns: draw them with --svg FILE"


def _balance_hint(plan: Plan) -> list[str]:
    """Where another cut of the same schedule waits less."""
    if plan.timeline is None or plan.balanced is None or plan.balanced.makespan > 0.99 * plan.timeline.makespan:
        return []
    share = f"idle {plan.balanced.idle_fraction:.1%}, makespan {plan.balanced.makespan:.4g} s"
    return [f"stages differ in cost: with pipeline.balance=cost {share}"]


def svg(plan: Plan) -> str:
    """The timeline of a pipeline."""
    assert plan.timeline is not None, "only a pipeline has a timeline"
    return draw_svg(plan.timeline, title=f"{plan.timeline.program.schedule}: {_shape(plan)}", unit="s")


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


def _memory(plan: Plan, traced: Sequence[MemoryBreakdown], memory_gib: float) -> str:
    """What each pipeline rank holds: `traced` by a dry run, else the estimate."""
    unit, name = _unit(plan)
    estimated = [f"{memory.total / unit:,.2f}" for memory in plan.memory]
    more = [["live microbatches", *(f"{number:g}" for number in plan.live)]]
    if any(memory.host for memory in plan.memory):
        more.append(["in host memory", *(f"{memory.host / unit:,.2f}" for memory in plan.memory)])
    if traced:
        more = [["estimate without a dry run", *estimated]]
    table = memory_table(traced or [memory.breakdown for memory in plan.memory], unit, more)
    source = "a dry run of each rank" if traced else f"estimate, to {MARGIN:.0%} of a dry run"
    found = max((one.peak for one in traced), default=0.0)
    verdict = _fits(found, f"{found / unit:,.1f}", name, memory_gib) if traced else _verdict(plan, memory_gib)
    return "\n".join([f"memory of a GPU [{name}]: {source}", table, verdict])


def memory_table(ranks: Sequence[MemoryBreakdown], unit: int, more: Sequence[Sequence[str]] = ()) -> str:
    """Kinds from top to bottom, the largest first, and pipeline ranks from left to right, in `unit` bytes; then `more`
    rows. Kinds below half a hundredth of a unit on every rank are skipped."""
    most = {kind: max(one.by_kind.get(kind, 0.0) for one in ranks) for one in ranks for kind in one.by_kind}
    rows = [["pipeline rank", *map(str, range(len(ranks)))]] if len(ranks) > 1 else []
    for kind in sorted(most, key=lambda kind: -most[kind]):
        if most[kind] >= 0.005 * unit:
            rows.append([kind, *(f"{one.by_kind.get(kind, 0.0) / unit:,.2f}" for one in ranks)])
    rows.append(["peak", *(f"{one.peak / unit:,.2f}" for one in ranks)])
    return _table([*rows, *more], left={0})


def _fits(peak: float, shown: str, name: str, memory_gib: float) -> str:
    verdict = "fits" if peak <= usable_bytes(memory_gib) else "does not fit"
    return f"{verdict}: {shown} {name} {_set_aside(memory_gib)}"


def _verdict(plan: Plan, memory_gib: float) -> str:
    limit, rows, (unit, name) = usable_bytes(memory_gib), plan.request.rows, _unit(plan)
    spread = f"{plan.heaviest / unit * (1 - MARGIN):,.1f} to {plan.heaviest / unit * (1 + MARGIN):,.1f}"
    needed = _fits(plan.heaviest, spread, name, memory_gib)
    largest = plan.largest_microbatch(limit)
    room = f"microbatch_size={largest} is the largest that does" if largest else "not even one row a microbatch does"
    if plan.heaviest > limit:
        return f"{needed}; {room}"
    more = f"; so does up to microbatch_size={largest}" if largest > rows else ""
    return f"{needed}{more}"


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
    return memory_unit(plan.heaviest)


def memory_unit(largest: float) -> tuple[int, str]:
    """The unit for a table whose largest entry is so many bytes, and its name."""
    return (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")


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
    lines = [f"{'schedule':<22} {'stages/rank':>11} {'time [s]':>9} {'idle':>7} {'efficiency':>10}  peak activations"]
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
