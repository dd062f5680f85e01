"""Text report of a dry run."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.dryrun.estimate import Estimate
from automodel_cli.dryrun.suggestions import Tried
from automodel_cli.dryrun.types import GIB, LIMITS, Line, RankResult
from automodel_cli.planning.report import memory_table, memory_unit, render_rate, render_shares, spread
from automodel_cli.planning.reserve import RESERVE_GIB

_ROWS = 12


def render_trace(found: Estimate) -> str:
    """Everything that `automodel dryrun` prints."""
    blocks = [_rank(rank, found) for rank in found.ranks]
    return "\n\n".join([*blocks, _step(found), f"limits\n{LIMITS}"])


def render_changes(before: Estimate, tried: Sequence[Tried]) -> str:
    """Changes that were dry-run, best first, below what they change."""
    if not tried:
        return "no change that the config's checks allow needs less memory by plan"
    lines = [f"peak [GiB]  {'step [s]':>12}  {'tokens/s/GPU':>16}", f"{_figures(before)}  as it is"]
    for one in tried:
        note = "" if one.change.same_training else "   (changes the training result)"
        if one.found is None:
            lines.append(f"{'-':>10}  {'-':>12}  {'-':>16}  {one.change}: {one.failed}")
        else:
            verdict = "fits" if one.found.fits else "does not fit"
            lines.append(f"{_figures(one.found)}  {verdict}: {one.change}{note}")
    return "\n".join(lines)


def _figures(found: Estimate) -> str:
    peak, step, rate = found.heaviest.peak / GIB, found.step_range, found.throughput
    return f"{peak:10.1f}  {spread(step.low, step.high):>12}  {spread(rate.low, rate.high):>16}"


def _rank(rank: RankResult, found: Estimate) -> str:
    head = (
        f"rank {rank.rank} of {found.num_gpus} ({rank.layout}): {rank.measured_microbatches} of "
        f"{rank.num_microbatches} microbatches of {rank.tokens_per_microbatch} tokens "
        f"[{rank.cpu_seconds:.0f} CPU s, {rank.rss_gib:.1f} GiB]"
    )
    n, (unit, name) = rank.measured_microbatches, memory_unit(rank.peak)
    exchanged = [
        f"{row['count']:7} x {row['operator']:24} {row['group']} ({row['ranks']} ranks)  {row['bytes'] / GIB:9.3f} GiB"
        f"  {row['seconds'] * 1e3:8.1f} ms"
        for row in rank.collectives[:_ROWS]
    ]
    return "\n".join(
        [
            head,
            *rank.notes,
            f"memory at the peak [{name}]",
            memory_table([rank.breakdown], unit, [["plan", f"{rank.plan / unit:,.2f}"]]),
            "largest at the peak",
            *(f"{line.amount / GIB:8.2f} GiB  {line.what}" for line in rank.largest),
            f"host synchronisations: {rank.num_syncs:g} ({rank.num_syncs / n:.1f} a microbatch)",
            *(f"{line.count:8g}  {line.what}" for line in rank.syncs[:_ROWS]),
            "collectives (bytes of the largest tensor of each call)",
            *exchanged,
            f"kernels: {rank.num_kernels} ({rank.num_kernels / n:.0f} a microbatch), {rank.flops / 1e12:.1f} TFLOP",
            *_kernels(rank.kernels, rank.kernel_seconds),
            *_front(rank),
        ]
    )


def _kernels(lines: Sequence[Line], whole: float) -> list[str]:
    return [
        f"{line.count:8g}  {line.what:34} {line.amount * 1e3:9.1f} ms {line.amount / whole if whole else 0:6.1%}"
        for line in lines[:_ROWS]
    ]


def _front(rank: RankResult) -> list[str]:
    """Time of tower and projector, which only the first stage has."""
    if not rank.front_seconds:
        return []
    share = rank.front_seconds * rank.measured_microbatches / rank.kernel_seconds
    milliseconds = rank.front_seconds * 1e3
    return [f"tower and projector: kernels of {milliseconds:.1f} ms a microbatch, {share:.0%} of this rank's"]


def memory(found: Estimate) -> str:
    """What the heaviest rank holds of what there is."""
    peak, gpu, reserved = found.heaviest.peak / GIB, found.gpu, found.reserved.times(1 / GIB)
    held = f" ({spread(reserved.low, reserved.high)} reserved by the allocator)" if found.fits else ""
    return f"{peak:.1f} GiB of tensors{held} and {RESERVE_GIB:g} set aside, of {gpu.memory_gib:g} ({gpu.name})"


def _step(found: Estimate) -> str:
    """What follows for the run."""
    lines = [
        f"{render_rate(found)}; kernels alone would allow {found.utilisation_bound:.0%}",
        f"calibration: {found.gpu.rates.provenance} (docs/planning/calibration.md)",
        *render_shares(found.seconds),
        f"{'fits' if found.fits else 'does not fit'}: {memory(found)}",
    ]
    if found.timeline is not None:
        lines.append(
            f"idle {found.timeline.idle_fraction:.1%} of the pipeline's time ({found.timeline.program.schedule})"
        )
    return "\n".join(lines)
