"""Explain out-of-memory errors: planned memory by kind, changes that free memory, a snapshot and a resume command."""

from __future__ import annotations

import gc
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.launch import signals
from automodel_cli.run.memory.memory_suggestions import Planned, plan_changes
from automodel_cli.training.torch_compat import dump_cuda_memory

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.planning.plan import Plan
    from automodel_cli.run.recipe import Recipe

GIB = 2**30
_CPU = "DefaultCPUAllocator"
_ASKED = re.compile(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
_SECONDS = 60.0
"""How long changes may be planned: the other ranks wait for this one to end."""
_SHOWN = 8
_CODE = ("automodel_cli/", "transformers/models/")


class OutOfMemory(RunError):
    """A run exceeded the available memory."""

    exit_code = 4
    code = "out_of_memory"


def find_oom_error(error: BaseException) -> BaseException | None:
    """Return the out-of-memory exception in the chain of `error`, or None.

    Torch raises OutOfMemoryError on devices and RuntimeError on the CPU.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)) or _CPU in str(seen):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def explain_oom(
    cause: BaseException, recipe: Recipe, source: Composed, run_dir: Path | None, world_size: int
) -> RunError:
    """Return the error that ends this rank. Frees the tensors of the failed step, so the run cannot continue."""
    rank = int(os.environ.get("RANK", "0"))
    on_gpu = isinstance(cause, torch.OutOfMemoryError)
    lines = [
        f"rank {rank} of {world_size} ran out of memory on the {'GPU' if on_gpu else 'CPU'}: {_first_sentence(cause)}"
    ]
    lines += [f"  at {place}" for place in _frames(cause)]
    if on_gpu and torch.cuda.is_available():
        lines += _on_device(run_dir, rank)
    _let_go(cause)
    changes: list[Planned] = []
    try:
        plan, changes = plan_changes(
            recipe, lambda more: _with_overrides(source, run_dir, more), world_size, seconds=_SECONDS
        )
        if not on_gpu:  # then host memory is exhausted
            changes = [one for one in changes if not any("offload_policy" in word for word in one.change.overrides)]
        lines += _resident(plan, rank * len(plan.memory) // world_size)
        lines += _freed(plan, changes)
    except (ConfigError, MemoryError, RuntimeError) as error:
        lines.append(f"memory could not be planned: {str(error).splitlines()[0]}")
    fix = f"{signals.resume_hint(run_dir)}, on more ranks or GPUs with more memory"
    if changes:
        chosen = _first_that_is_enough(plan, changes, _requested_bytes(cause))
        fix = _resume(run_dir, source, chosen)
        if on_gpu and run_dir is not None:
            traced = f"automodel dryrun -c {word(run_dir / 'config.yaml')} --gpus {world_size} {chosen.change}"
            lines.append(f"to measure a real step with this change without a GPU: {traced}")
    return OutOfMemory("\n".join(lines), fix=fix)


def _with_overrides(source: Composed, run_dir: Path | None, more: Sequence[str]) -> object:
    """Return the checked recipe with more overrides, as `automodel resume` would read it."""
    from automodel_cli.config.check import check_config
    from automodel_cli.config.composition.compose import compose

    if run_dir is None:
        composed = compose(source.path, (*source.overrides, *more))
    else:
        composed = compose(run_dir / "config.yaml", more, run_dir=run_dir)
    return check_config(composed, source.trust, [])


def _first_sentence(cause: BaseException) -> str:
    """Return the first sentence of torch's message, without its advice."""
    text = str(cause).partition("\n")[0].strip()
    if _CPU in text:
        text = text[text.index(_CPU) + len(_CPU) :].lstrip(": ")
    return ". ".join(text.split(". ")[:2]) or type(cause).__name__


def _requested_bytes(cause: BaseException) -> float:
    """Return the requested bytes, or 0 if the message does not contain them."""
    match = _ASKED.search(str(cause))
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _frames(cause: BaseException) -> Iterator[str]:
    """Yield the innermost frame of automodel or of model code."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        at = next((frame.filename.rfind(mark) for mark in _CODE if mark in frame.filename), -1)
        if at >= 0:
            yield f"{frame.filename[at:]}:{frame.lineno} {frame.name}"
            return


def _on_device(run_dir: Path | None, rank: int) -> Iterator[str]:
    """Yield memory totals of the allocator and the driver, and write a snapshot for torch's memory viewer."""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    others = total - free - reserved
    yield (
        f"  of {total / GIB:.1f} GiB: {allocated / GIB:.1f} in tensors, {(reserved - allocated) / GIB:.1f} reserved "
        f"by the allocator, {others / GIB:.1f} for the CUDA context, NCCL and other processes"
    )
    if run_dir is not None:
        path = run_dir / "logs" / f"memory-rank-{rank}.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # torch would follow a link that somebody put there
            dump_cuda_memory(path)
            yield f"  memory snapshot: {path}   (open it at pytorch.org/memory_viz)"
        except (RuntimeError, OSError) as error:
            yield f"  the memory snapshot could not be written: {error}"


def _let_go(cause: BaseException) -> None:
    """Release the tensors of the failed step, because planning needs host memory."""
    error: BaseException | None = cause
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _resident(plan: Plan, pipeline_rank: int) -> list[str]:
    memory = plan.memory[pipeline_rank]
    parts = ", ".join(f"{name} {_amount(size)}" for name, size in memory.breakdown.by_kind.items() if size)
    return [f"a step needs {_amount(memory.total)} by plan: {parts}"]


def _freed(plan: Plan, found: Sequence[Planned]) -> list[str]:
    """Return lines with the memory that each change frees, cheapest first."""
    if not found:
        return ["no known change of the config frees at least 1%"]
    lines = ["changes and the memory that they free by plan, fastest first:"]
    for one in found[:_SHOWN]:
        note = "" if one.change.same_training else "   (changes the training result)"
        lines.append(f"  {_amount(plan.heaviest - one.plan.heaviest):>10}  {one.change}{note}")
    return lines


def _first_that_is_enough(plan: Plan, found: Sequence[Planned], asked: float) -> Planned:
    """Return the cheapest change that frees the requested memory and at least 10%, else the change that frees most.

    Changes that keep the training result come first.
    """
    same = [one for one in found if one.change.same_training] or list(found)
    enough = [one for one in same if plan.heaviest - one.plan.heaviest >= max(asked, 0.1 * plan.heaviest)]
    return enough[0] if enough else min(same, key=lambda one: one.plan.heaviest)


def _resume(run_dir: Path | None, source: Composed, chosen: Planned) -> str:
    """Return the resume command with the chosen change."""
    if run_dir is None:
        return str(chosen.change)
    command, _, note = signals.resume_hint(run_dir).partition("   ")
    return f"{command} {chosen.change}   {note}"


def _amount(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
