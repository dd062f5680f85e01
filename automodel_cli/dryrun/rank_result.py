"""The result of a traced rank, from the counters of its measured step."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.dryrun.fake_device.counts import Counts, Work
from automodel_cli.dryrun.microbatch_count import alive
from automodel_cli.dryrun.model_flops import model_flops_per_token
from automodel_cli.dryrun.rank_state import RankTrace, StepTimes
from automodel_cli.dryrun.synthetic_batches import Columns
from automodel_cli.dryrun.types import Line, RankResult, TraceRequest
from automodel_cli.models.hub.source import hf_config
from automodel_cli.planning.plan import Plan
from automodel_cli.planning.simulated_clock import Seconds, summed
from automodel_cli.planning.step_time import apart, program_to_json
from automodel_cli.run.recipe import Recipe

_LARGEST = 14


def result_of(run: RankTrace, mesh: Mesh, plan: Plan, times: StepTimes, columns: list[Columns]) -> RankResult:
    """Return what the measured step of a rank showed."""
    counts, recipe, request, layout = run.mode.counts, run.recipe, run.request, mesh.layout
    snapshot = run.memory.result()
    tokens = round(sum(sum(one.lengths) for one in columns) / len(columns))
    longest = max(one.input_ids.numel() for one in columns)
    per_stage = request.num_gpus // layout.pp
    in_actions = summed([seconds for spans in run.actions.values() for seconds in spans])
    more = max(times.num_measured - times.num_warm, 1)
    once, microbatch = apart(times.warm, times.measured, times.num_warm, times.num_measured)
    whole = _of_all_microbatches(counts, (recipe.train.num_microbatches(layout.dp) - times.num_measured) / more)
    return RankResult(
        rank=request.rank,
        layout=str(layout),
        num_microbatches=recipe.train.num_microbatches(layout.dp),
        measured_microbatches=times.num_measured,
        tokens_per_microbatch=tokens,
        peak=snapshot.total,
        peak_by_kind=dict(snapshot.by_kind.most_common()),
        largest=[
            Line(f"{kind}: {operator} at {line}" if line else f"{kind}: {operator}, blocks below 8 MiB", 1, size)
            for (kind, operator, line), size in snapshot.blocks.most_common(_LARGEST)
        ],
        plan=plan.memory[request.rank // per_stage].total,
        syncs=[Line(f"{what} at {line}", n) for (what, line), n in counts.syncs.most_common()],
        collectives=run.collectives.rows(),
        kernels=[
            Line(name, counts.kernels[name], took)
            for name, took in sorted(counts.seconds.items(), key=lambda entry: -entry[1])
        ],
        num_kernels=sum(counts.kernels.values()),
        flops=counts.flops,
        kernel_seconds=sum(counts.seconds.values()),
        step_flops=whole.flops,
        step_kernel_seconds=whole.seconds,
        data_parallel=layout.dp,
        actions=_means(run, recipe.train.num_microbatches(layout.dp)),
        pipeline=program_to_json(plan.timeline.program, plan.timeline.costs.forward) if plan.timeline else None,
        once_seconds=once,
        microbatch_seconds=microbatch,
        outside_seconds=summed([times.measured], minus=in_actions),
        hop_seconds=_hop(recipe, request, layout, longest),
        model_flops_per_token=model_flops_per_token(recipe, run.parts, columns, plan.num_trained),
        front_seconds=counts.front_seconds / times.num_measured,
        cpu_seconds=0.0,
        rss_gib=0.0,
        notes=[*_notes(recipe, request), *_of_fewer(plan, times.num_measured)],
    )


def _of_all_microbatches(counts: Counts, more: float) -> Work:
    """Of the config's step: the measured one, and `more` times what it did more than the step before it."""
    measured = Work(counts.flops, sum(counts.seconds.values()))
    return Work(
        measured.flops + more * (measured.flops - counts.warm.flops),
        measured.seconds + more * (measured.seconds - counts.warm.seconds),
    )


def _means(run: RankTrace, count: int) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, stage), spans in run.actions.items():
        found.setdefault(kind, {})[str(stage)] = mean_of_all(spans, count)
    return found


def mean_of_all(spans: Sequence[Seconds], count: int) -> dict[str, float]:
    """Return the mean of an action over `count` microbatches, from those that were traced.

    The first one gathers parameters, and the last one reduces gradients. The others do the same as each other.

    Example: 3 s, 1 s, 1 s and 2 s of 10 microbatches are 13 s, so the mean is 1.3 s.
    """
    ends, middle = [spans[0], *spans[1:][-1:]], spans[1:-1]
    more = (count - len(ends)) / max(len(middle), 1)
    return {
        kind: (summed(ends).get(kind, 0.0) + more * summed(middle).get(kind, 0.0)) / (count if middle else len(ends))
        for kind in summed(spans)
    }


def _hop(recipe: Recipe, request: TraceRequest, layout: Layout, tokens: int) -> float:
    """Seconds that hidden states take to the next stage."""
    if layout.pp == 1:
        return 0.0
    dtype = recipe.compute_dtype
    size = tokens / layout.cp * hf_config(recipe.model).get_text_config().hidden_size * dtype.itemsize
    neighbour = (request.rank + request.num_gpus // layout.pp) % request.num_gpus
    return request.links.seconds("send", size, (request.rank, neighbour))


def _of_fewer(plan: Plan, number: int) -> list[str]:
    """A note where the config's step keeps more microbatches alive than one of so many, which somebody asked for."""
    count = plan.request.num_microbatches
    if plan.cut is None or number >= count or alive(plan, number) == alive(plan, count):
        return []
    most = max(alive(plan, count))
    return [f"--microbatches {number}: the peak is that of so few; in a step of {count} up to {most:g} are alive"]


def _notes(recipe: Recipe, request: TraceRequest) -> list[str]:
    notes = []
    if recipe.parallelizer.enable_compile is True:
        notes.append("enable_compile=true: counted as if it were false")
    elif recipe.parallelizer.enable_compile:
        notes.append(f"enable_compile={recipe.parallelizer.enable_compile}: fused operations counted as compiled")
    if recipe.parallelizer.autocast_dtype is not None:
        notes.append("autocast_dtype: counted in the dtype that parameters have, torch does not cast fakes")
    if recipe.packing_note is not None:
        notes.append(recipe.packing_note)
    if request.route == "worst":
        notes.append("routers: every token chooses the experts of the first rank")
    if recipe.frozen_model is not None:
        notes.append("the frozen model is held, its own passes are not run")
    return notes
