"""Implementation of `automodel dryrun`: trace ranks in separate processes and report the results."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.dryrun import report
from automodel_cli.dryrun.estimate import Estimate, estimate
from automodel_cli.dryrun.suggestions import try_changes
from automodel_cli.dryrun.types import RankResult, TraceRequest
from automodel_cli.planning.report import render_rate
from automodel_cli.planning.reserve import MemoryBreakdown
from automodel_cli.run.recipe import Recipe

LARGEST_WORLD = 4096
_WORKER = [sys.executable, "-m", "automodel_cli.dryrun.worker"]


class DryRunError(RunError):
    """The dry run itself failed. Nothing follows for the run."""

    code = "dry_run_failed"


def dry_run(
    recipe: Recipe, request: TraceRequest, *, every: bool, changes: int, json_file: Path | None, svg: Path | None
) -> int:
    """Trace `request.rank`, or with `every` one rank of each stage, and where that does not fit at most `changes`
    changes of the config; print, and write what is asked for. Returns 0. Raises ConfigError for what is refused,
    RunError where the step fails, DryRunError where the dry run itself does."""
    layout = _layout(recipe, request.num_gpus)
    if svg is not None and layout.pp == 1:
        raise ConfigError(
            "--svg requires pipeline parallelism, but mesh.pp_size=1",
            code="requires_setting",
            keys=("--svg", "mesh.pp_size"),
            fix="mesh.pp_size=2 pipeline=1f1b, or remove --svg",
        )
    found = trace_config(request, distinct_ranks(layout) if every else (request.rank,))
    print(report.render_trace(found))
    tried = []
    if changes and not found.fits:
        print(f"\ndoes not fit: planning changes, and running {changes} of them", flush=True)
        tried = try_changes(recipe, request, changes, _whose_steps(every), trace_config, request.device)
        print(report.render_changes(found, tried))
    if json_file is not None:
        known = found.to_json() | ({"changes": [one.to_json() for one in tried]} if tried else {})
        json_file.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to {json_file}")
    if svg is not None and found.timeline is not None:
        from automodel_cli.pipelining.timeline.svg import draw_svg

        title = f"{found.timeline.program.schedule} on estimated times: {layout}"
        svg.write_text(draw_svg(found.timeline, title=title, unit="s"), encoding="utf-8")
        print(f"timeline written to {svg}")
    return 0


def traced_memory(recipe: Recipe, request: TraceRequest) -> list[MemoryBreakdown]:
    """What a rank of each pipeline stage holds, for `automodel plan --traced`. Raises as `measure` does."""
    layout = _layout(recipe, request.num_gpus)
    return [trace_rank(replace(request, rank=rank)).breakdown for rank in distinct_ranks(layout)]


def check_step(recipe: Recipe, request: TraceRequest) -> str:
    """For `automodel check --gpus`: what a step of every stage's rank takes. Raises ConfigError where it does not fit,
    and as `measure` does."""
    found = trace_config(request, distinct_ranks(_layout(recipe, request.num_gpus)))
    if found.fits:
        return f"the step of every stage runs, and fits: {report.memory(found)}; {render_rate(found)}"
    command = (
        f"automodel dryrun -c {word(request.conf)} --gpus {request.num_gpus} --rank all-distinct --gpu {request.gpu}"
    )
    raise ConfigError(
        f"the step of rank {found.heaviest.rank} does not fit: {report.memory(found)}",
        code="does_not_fit",
        fix=" ".join((command, *map(shlex.quote, request.overrides))) + "   (searches for changes that fit)",
    )


def _whose_steps(every: bool) -> Callable[[Layout, int], tuple[int, ...]]:
    """Of a changed config: all distinct ranks, or the first of the pipeline rank that its plan says is the heaviest."""
    return lambda layout, heaviest: distinct_ranks(layout) if every else (distinct_ranks(layout)[heaviest],)


def distinct_ranks(layout: Layout) -> tuple[int, ...]:
    """One rank of each stage: within one, ranks hold shards of the same size and, with balanced routers, do the same.
    The first has the most where sizes do not divide evenly."""
    return tuple(range(0, layout.world_size, layout.world_size // layout.pp))


def trace_config(request: TraceRequest, ranks: Sequence[int]) -> Estimate:
    """Raises ConfigError for what a worker refuses, RunError for a step that fails, DryRunError for a fault of ours."""
    found = [trace_rank(replace(request, rank=rank)) for rank in ranks]
    return estimate(found, request.device, request.num_gpus)


def trace_rank(request: TraceRequest) -> RankResult:
    """In a process of its own, which tells what it found in its last line."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        _WORKER, input=request.to_json(), capture_output=True, text=True, env=environment, check=False
    )
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise _ours(request, f"its process ended without a result: {words[0]}") from None
    if "refused" in answer:
        refused = answer["refused"]
        raise ConfigError(**refused)
    if "failed" in answer:
        failed = answer["failed"]
        print(failed["trace"], file=sys.stderr)
        if failed["ours"]:
            raise _ours(request, failed["message"])
        raise RunError(
            f"rank {request.rank}: the step fails, and would fail on a GPU as well: {failed['message']}",
            code="run_failed",
        )
    return RankResult.from_dict(answer["result"])


def _ours(request: TraceRequest, what: str) -> DryRunError:
    trusted = [word for package in request.trust_packages for word in ("--trust-package", package)]
    words = ["plan", "-c", request.conf, "--gpus", str(request.num_gpus), *trusted, *request.overrides]
    return DryRunError(
        f"rank {request.rank}: the dry run failed with torch {version('torch')} because of a bug in automodel: {what}. "
        "The run itself may still work",
        fix=f"{shlex.join(['automodel', *words])}   (estimates memory and time without a step)",
    )


def _layout(recipe: Recipe, num_gpus: int) -> Layout:
    if num_gpus > LARGEST_WORLD:
        raise ConfigError(
            f"--gpus {num_gpus} must be at most {LARGEST_WORLD}",
            code="out_of_range",
            keys=("--gpus",),
            fix=f"--gpus {LARGEST_WORLD}",
        )
    recipe.check_ranks(num_gpus)
    layout: Layout = recipe.mesh.resolve(num_gpus)
    return layout
