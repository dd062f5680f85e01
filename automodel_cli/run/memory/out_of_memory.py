"""When memory runs out: what was resident by plan, which changes free how much, a snapshot, and how to go on."""

from __future__ import annotations

import gc
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.launch import signals
from automodel_cli.run.memory.memory_suggestions import Planned, plan_changes
from automodel_cli.training.torch_compat import dump_cuda_memory

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed
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
    """A run that needed more memory than there was."""

    exit_code = 4
    code = "out_of_memory"


def find_oom_error(error: BaseException) -> BaseException | None:
    """The exception that says so, `error` or what it was raised from; None where something else was wrong.

    Torch has a class for its devices and a RuntimeError for the CPU.
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
    """The error to end this rank with. Frees what the failed step still holds, so ask once, when all is lost anyway."""
    rank = int(os.environ.get("RANK", "0"))
    on_gpu = isinstance(cause, torch.OutOfMemoryError)
    lines = [f"rank {rank} of {world_size} ran out of memory on the {'GPU' if on_gpu else 'CPU'}: {_said(cause)}"]
    lines += [f"  at {place}" for place in _place(cause)]
    if on_gpu and torch.cuda.is_available():
        lines += _on_device(run_dir, rank)
    _let_go(cause)
    found: list[Planned] = []
    try:
        plan, found = plan_changes(
            recipe, lambda more: _with_overrides(source, run_dir, more), world_size, seconds=_SECONDS
        )
        if not on_gpu:  # then host memory is what there is too little of
            found = [one for one in found if not any("offload_policy" in word for word in one.change.overrides)]
        lines += _resident(plan, rank * len(plan.memory) // world_size)
        lines += _freed(plan, found)
    except (ConfigError, MemoryError, RuntimeError) as error:
        lines.append(f"no plan could be made of what was resident: {str(error).splitlines()[0]}")
    fix = f"{signals.resume_hint(run_dir)}, on more ranks or GPUs with more memory"
    if found:
        chosen = _first_that_is_enough(plan, found, _asked(cause))
        fix = _resume(run_dir, source, chosen)
        if on_gpu and run_dir is not None:
            traced = f"automodel dryrun -c {word(run_dir / 'config.yaml')} --gpus {world_size} {chosen.change}"
            lines.append(f"what a real step then takes, by kind and line, is found without a GPU: {traced}")
    return OutOfMemory("\n".join(lines), fix=fix)


def _with_overrides(source: Composed, run_dir: Path | None, more: Sequence[str]) -> Any:
    """The run's own config, as `automodel resume` would read it."""
    from automodel_cli.config.check import check_config
    from automodel_cli.config.compose import compose

    if run_dir is None:
        composed = compose(source.path, (*source.overrides, *more))
    else:
        composed = compose(run_dir / "config.yaml", more, run_dir=run_dir)
    return check_config(composed, source.trust, [])


def _said(cause: BaseException) -> str:
    """Torch's first sentence, without its advice."""
    text = str(cause).partition("\n")[0].strip()
    if _CPU in text:
        text = text[text.index(_CPU) + len(_CPU) :].lstrip(": ")
    return ". ".join(text.split(". ")[:2]) or type(cause).__name__


def _asked(cause: BaseException) -> float:
    """Bytes that could not be had; 0 where the message does not say."""
    found = _ASKED.search(str(cause))
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def _place(cause: BaseException) -> Iterator[str]:
    """The innermost line of this program or of a model."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        at = next((frame.filename.rfind(mark) for mark in _CODE if mark in frame.filename), -1)
        if at >= 0:
            yield f"{frame.filename[at:]}:{frame.lineno} {frame.name}"
            return


def _on_device(run_dir: Path | None, rank: int) -> Iterator[str]:
    """What the allocator and the driver say, and a snapshot for torch's viewer (docs.pytorch.org/memory_viz)."""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    others = total - free - reserved
    yield (
        f"  of {total / GIB:.1f} GiB: {allocated / GIB:.1f} in tensors, {(reserved - allocated) / GIB:.1f} reserved "
        f"beside them, {others / GIB:.1f} of the context, NCCL and other processes"
    )
    if run_dir is not None:
        path = run_dir / "logs" / f"memory-rank-{rank}.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # torch would follow a link that somebody put there
            dump_cuda_memory(path)
            yield f"  every block of the GPU is in {path}   (open it at pytorch.org/memory_viz)"
        except (RuntimeError, OSError) as error:
            yield f"  no snapshot of the GPU's blocks: {error}"


def _let_go(cause: BaseException) -> None:
    """Of what the frames of the failed step refer to: a plan needs some memory of the host."""
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
    """What changes would free, cheapest first, those that train something else last."""
    if not found:
        return ["no change of the config that a plan knows of would free 1%"]
    lines = ["changes and what they free by plan, from the cheapest in time to the dearest:"]
    for one in found[:_SHOWN]:
        note = "" if one.change.same_training else "   (trains something else)"
        lines.append(f"  {_amount(plan.heaviest - one.plan.heaviest):>10}  {one.change}{note}")
    return lines


def _first_that_is_enough(plan: Plan, found: Sequence[Planned], asked: float) -> Planned:
    """The cheapest that frees what was asked for and a tenth of the whole, else the one that frees the most; of those
    that train the same, if there is one."""
    same = [one for one in found if one.change.same_training] or list(found)
    enough = [one for one in same if plan.heaviest - one.plan.heaviest >= max(asked, 0.1 * plan.heaviest)]
    return enough[0] if enough else min(same, key=lambda one: one.plan.heaviest)


def _resume(run_dir: Path | None, source: Composed, chosen: Planned) -> str:
    """The command to go on with."""
    if run_dir is None:
        return str(chosen.change)
    command, _, note = signals.resume_hint(run_dir).partition("   ")
    return f"{command} {chosen.change}   {note}"


def _amount(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
