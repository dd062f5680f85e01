"""Text report of a dry run."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.dryrun.estimate import Estimate
from automodel_cli.dryrun.suggestions import Tried
from automodel_cli.dryrun.types import GIB, LIMITS, Line, RankResult
from automodel_cli.planning.report import memory_table, memory_unit
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
    lines = ["peak [GiB]  step [s]  tokens/s/GPU", f"{_figures(before)}  as it is"]
    for one in tried:
        note = "" if one.change.same_training else "   (changes the training result)"
        if one.found is None:
            lines.append(f"{'-':>10}  {'-':>8}  {'-':>12}  {one.change}: {one.failed}")
        else:
            verdict = "fits" if one.found.fits else "does not fit"
            lines.append(f"{_figures(one.found)}  {verdict}: {one.change}{note}")
    return "\n".join(lines)


def _figures(found: Estimate) -> str:
    return f"{found.heaviest.peak / GIB:10.1f}  {found.step_seconds:8.3g}  {found.tokens_per_second_per_gpu:12,.0f}"


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
        ]
    )


def _kernels(lines: Sequence[Line], whole: float) -> list[str]:
    return [
        f"{line.count:8g}  {line.what:34} {line.amount * 1e3:9.1f} ms {line.amount / whole if whole else 0:6.1%}"
        for line in lines[:_ROWS]
    ]


def memory(found: Estimate) -> str:
    """What the heaviest rank holds of what there is."""
    peak, gpu = found.heaviest.peak / GIB, found.gpu
    return f"{peak:.1f} GiB and {RESERVE_GIB:g} set aside, of {gpu.memory_gib:g} ({gpu.name})"


def rate(found: Estimate) -> str:
    """How fast a step would be."""
    mfu = "unknown (the model's FLOPs are not counted)" if found.mfu is None else f"{found.mfu:.1%}"
    tokens = f"{found.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    return f"step {found.step_seconds:.3g} s, {tokens}, MFU {mfu} (estimated, never calibrated)"


def _step(found: Estimate) -> str:
    """What follows for the run."""
    lines = [
        f"{rate(found)}; kernels alone would allow {found.utilisation_bound:.0%}",
        f"{'fits' if found.fits else 'does not fit'}: {memory(found)}",
    ]
    if found.timeline is not None:
        lines.append(
            f"idle {found.timeline.idle_fraction:.1%} of the pipeline's time ({found.timeline.program.schedule})"
        )
    return "\n".join(lines)
