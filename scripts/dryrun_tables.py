"""The tables of docs/performance.md: every bundled recipe of real size by dry run, one commit, no GPU.

    python scripts/dryrun_tables.py [--only NAME ...] [--jobs 2] [--out figures.json]

Runs `automodel dryrun` for the ranks below (5 to 70 CPU seconds each) and prints two tables in markdown: what each rank
holds, waits for and launches, and what follows for the run beside published figures. With `--out`, what was found so
far is kept there, and a later call runs only what is missing. Fails where `plan` is more than 10% off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from automodel_cli.dryrun.command import trace_rank
from automodel_cli.dryrun.estimate import Estimate, estimate
from automodel_cli.dryrun.types import GIB, RankResult, TraceRequest
from automodel_cli.planning.report import spread


class Row(NamedTuple):
    """A recipe, its GPUs and the ranks to trace (one of each kind of stage)."""

    recipe: str
    gpus: int
    ranks: tuple[int, ...]
    published: str = "-"
    overrides: tuple[str, ...] = ()


_LORA = (
    "mesh.tp_size=1", "mesh.cp_size=1", "mesh.dp_size=null", "parallelizer.sequence_parallel=false",
    "model.lora={rank: 16}", "data.seq_len=4096",
)  # fmt: skip
ROWS = (
    Row("gpt_oss_pp2ep4", 8, (0, 4), "13,058"),
    Row("qwen3_moe_30b_ep8", 8, (0,), "12,040"),
    Row("moonlight_16b_pp2ep4", 8, (0, 4)),
    Row("llama3_8b_tp2cp2", 8, (0,)),
    Row("llama3_8b_tp2cp2", 1, (0,), "12,473 (LoRA, one GPU)", _LORA),
    Row("dpo_llama3_8b_pp2", 8, (0, 4)),
    Row("grpo_moonlight_16b_pp2ep4", 8, (0, 4)),
    Row("deepseek_v3_pp16_ep64", 1024, (0, 448, 960), "1,002 (256 GPUs)"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="recipes, by name")
    parser.add_argument("--jobs", type=int, default=2, help="ranks at a time")
    parser.add_argument("--out", type=Path, help="file that keeps what was found")
    given = parser.parse_args(arguments)
    rows = [row for row in ROWS if given.only is None or row.recipe in given.only]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    known: dict[str, Any] = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    missing = [(row, rank) for row in rows for rank in row.ranks if _key(row, rank) not in known]
    with ThreadPoolExecutor(given.jobs) as pool:
        for key, result in pool.map(_traced, missing):
            known[key] = result.to_dict()
            if given.out:
                given.out.write_text(json.dumps(known))
    print(f"at commit {commit.strip()}\n\n{_of_ranks(rows, known)}\n\n{_of_runs(rows, known)}")
    far = [f"{row.recipe}, {rank.rank}" for row in rows for rank in _results(row, known) if _is_far(rank)]
    if far:
        print(f"\nplan is more than 10% off: {'; '.join(far)}")
    return 1 if far else 0


def _is_far(rank: RankResult) -> bool:
    return abs(rank.plan - rank.peak) > 0.10 * rank.peak


def _key(row: Row, rank: int) -> str:
    return " ".join((row.recipe, *row.overrides, f"{rank}/{row.gpus}"))


def _traced(asked: tuple[Row, int]) -> tuple[str, RankResult]:
    row, rank = asked
    return _key(row, rank), trace_rank(TraceRequest(row.recipe, row.overrides, row.gpus, rank))


def _results(row: Row, known: dict[str, Any]) -> list[RankResult]:
    return [RankResult.from_dict(known[_key(row, rank)]) for rank in row.ranks]


def _of_ranks(rows: Sequence[Row], known: dict[str, Any]) -> str:
    counts = ("host waits per microbatch", "kernels per microbatch")
    headings = ("recipe, rank", "recomputed", "peak (`plan`) [GiB]", *counts, "kernel bound", "dry run [CPU s]")
    lines = [
        f"| {' | '.join(headings)} |",
        "|---|---|---|--:|--:|---|--:|",
    ]
    for row in rows:
        for rank in _results(row, known):
            n = rank.measured_microbatches
            mode = next((note.split()[1] for note in rank.notes if note.startswith("recompute:")), "as configured")
            bound = estimate([rank], TraceRequest("", (), row.gpus).device, row.gpus).utilisation_bound
            memory = f"{rank.peak / GIB:.1f} ({rank.plan / GIB:.1f})"
            lines.append(
                f"| {_named(row)}, {rank.rank} of {row.gpus:,} | {mode} | {memory} "
                f"| {rank.num_syncs / n:.1f} | {rank.num_kernels / n:,.0f} | {bound:.0%} | {rank.cpu_seconds:.0f} |"
            )
    return "\n".join(lines)


def _of_runs(rows: Sequence[Row], known: dict[str, Any]) -> str:
    lines = [
        "| recipe, GPUs | kernel bound | pipeline idle | step [s] | MFU | tokens/s/GPU, estimated | published |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found: Estimate = estimate(_results(row, known), TraceRequest("", (), row.gpus).device, row.gpus)
        idle = "-" if found.timeline is None else f"{found.timeline.idle_fraction:.0%}"
        mfu = "-" if found.mfu is None else f"{found.mfu.low:.0%} to {found.mfu.high:.0%}"
        step, rate = found.step_range, found.throughput
        lines.append(
            f"| {_named(row)}, {row.gpus:,} | {found.utilisation_bound:.0%} | {idle} "
            f"| {spread(step.low, step.high)} | {mfu} | {spread(rate.low, rate.high)} | {row.published} |"
        )
    return "\n".join(lines)


def _named(row: Row) -> str:
    return f"`{row.recipe}`" + (" with LoRA" if any("lora" in word for word in row.overrides) else "")


if __name__ == "__main__":
    sys.exit(main())
