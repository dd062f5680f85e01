"""Suggest config changes that need less memory, with the planned memory of each.

Suggestions are always valid: a change is composed into the config and checked like a command line, and its memory comes
from the resulting plan. A dry run can then measure the most promising ones.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh_config import Layout
    from automodel_cli.planning.plan import Plan
    from automodel_cli.run.recipe import Recipe

WithOverrides = Callable[[Sequence[str]], Any]
"""The checked recipe with more overrides. Raises ConfigError."""
_OFFLOAD = "parallelizer.offload_policy={_target_: automodel_cli.distributed.config.CPUOffload}"
_MODES = ("selective", "full", "minimal")
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Change:
    """Overrides that go together. `same_training`: the run learns the same from the same tokens, rounding aside."""

    overrides: tuple[str, ...]
    same_training: bool = True

    def __str__(self) -> str:
        """As it is pasted behind a command."""
        return " ".join(shlex.quote(word) if set(word) & set(" {}'\"") else word for word in self.overrides)


@dataclass(frozen=True)
class Planned:
    """A change that the checks allow, the recipe that it makes and its plan."""

    change: Change
    recipe: Recipe
    plan: Plan


def memory_saving_changes(recipe: Recipe, layout: Layout) -> Iterator[Change]:
    """Yield changes from the fastest to the slowest. Changes of the training result come last."""
    yield from _recomputation(recipe, layout)
    yield from _microbatches(recipe)
    pipeline = recipe.pipeline
    if pipeline is not None and pipeline.schedule != "1f1b":
        yield Change(("pipeline=1f1b",))
    if pipeline is not None and pipeline.balance != "cost":
        yield Change(("pipeline.balance=cost",))
    if layout.dp_replicate > 1:
        yield Change(("mesh.dp_replicate_size=1",))
    if recipe.parallelizer.name != "fsdp2":
        yield Change(("parallelizer=fsdp2",))
    if getattr(recipe.parallelizer, "defer_fsdp_grad_sync", False):
        yield Change(("parallelizer.defer_fsdp_grad_sync=false",))
    yield from _axes(recipe, layout)
    if getattr(recipe.parallelizer, "offload_policy", "none such") is None:
        yield Change((_OFFLOAD,))
    if recipe.data.seq_len > 1024:
        yield Change((f"data.seq_len={recipe.data.seq_len // 2}",), same_training=False)
    if recipe.model.dtype == "float32":
        yield Change(("model.dtype=bfloat16",), same_training=False)
    if recipe.model.lora is None:
        yield Change(("model.lora={rank: 16}",), same_training=False)


def _recomputation(recipe: Recipe, layout: Layout) -> Iterator[Change]:
    """Modes that keep less than the config's."""
    now = recipe.parallelizer.activation_checkpointing
    if isinstance(now, str):  # "auto" depends on the free memory of a plan
        kept = _MODES.index(now) if now in _MODES else -1
    else:
        kept = 1 if now is True or now == 1 else 0 if now else -1
    for place, mode in enumerate(_MODES):
        if place > kept and (mode != "minimal" or layout.ep > 1):  # only exchanges of tokens differ
            yield Change((f"parallelizer.activation_checkpointing={mode}",))


def _microbatches(recipe: Recipe) -> Iterator[Change]:
    """Smaller ones, more of them: the step stays the same."""
    rows = recipe.train.microbatch_size
    for fewer in dict.fromkeys((rows // 2, 1)):
        if 0 < fewer < rows:
            yield Change((f"train.microbatch_size={fewer}",))


def _axes(recipe: Recipe, layout: Layout) -> Iterator[Change]:
    """One axis twice as long, at the cost of data parallelism."""
    free = ("mesh.dp_size=null",) if recipe.mesh.dp_size is not None else ()
    sequence = ("parallelizer.sequence_parallel=true",) if layout.tp == 1 else ()
    pipeline = ("pipeline=1f1b",) if recipe.pipeline is None else ()
    doubled: list[tuple[str, int, tuple[str, ...]]] = [
        ("ep_size", layout.ep, ()),
        ("cp_size", layout.cp, ()),
        ("tp_size", layout.tp, sequence),
        ("pp_size", layout.pp, pipeline),
    ]
    for name, size, others in doubled:
        if 2 * size <= layout.world_size:
            yield Change((f"mesh.{name}={2 * size}", *others, *free))


def plan_changes(
    recipe: Recipe, with_overrides: WithOverrides, num_gpus: int, *, seconds: float | None = None
) -> tuple[Plan, list[Planned]]:
    """The plan as it is, and each legal change whose heaviest GPU needs at least 1% less, in the order of `changes`.
    After `seconds` no other change is looked at."""
    began = time.monotonic()
    before, changes = _plan(recipe, num_gpus), []
    for change in memory_saving_changes(recipe, recipe.mesh.resolve(num_gpus)):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        one = plan_change(change, with_overrides, num_gpus)
        if one is not None and one.plan.heaviest < (1 - _LEAST_GAIN) * before.heaviest:
            changes.append(one)
    return before, changes


def plan_change(change: Change, with_overrides: WithOverrides, num_gpus: int) -> Planned | None:
    """Return the plan with a change, or None if the config checks reject it."""
    try:
        changed = with_overrides(change.overrides)
        changed.check_ranks(num_gpus)
        return Planned(change, changed, _plan(changed, num_gpus))
    except ConfigError:
        return None


def _plan(recipe: Recipe, num_gpus: int) -> Plan:
    from automodel_cli.models.hub import bundled_configs
    from automodel_cli.planning.plan import make_plan
    from automodel_cli.run.plan_request import plan_request

    with bundled_configs.preferred():
        return make_plan(plan_request(recipe, recipe.mesh.resolve(num_gpus)))
