"""Find config changes that fit into memory: plan all, dry-run the most promising."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.dryrun.estimate import Estimate
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.dryrun.worker import load
from automodel_cli.planning.hardware import Gpu
from automodel_cli.planning.reserve import usable_bytes
from automodel_cli.run.memory.memory_suggestions import Change, Planned, WithOverrides, plan_change, plan_changes
from automodel_cli.run.recipe import Recipe

Measure = Callable[[TraceRequest, Sequence[int]], Estimate]
RanksOf = Callable[[Layout, int], Sequence[int]]
"""(layout, heaviest pipeline rank) -> whose steps are traced."""


@dataclass(frozen=True)
class Tried:
    """A change and the dry run of it; None and `failed` where the step would fail."""

    change: Change
    found: Estimate | None
    failed: str = ""

    def to_json(self) -> dict[str, object]:
        known = {} if self.found is None else self.found.to_json()
        kept = {key: known[key] for key in ("peak_gib", "fits", "step_seconds", "tokens_per_second_per_gpu") if known}
        return {"overrides": list(self.change.overrides), "same_training": self.change.same_training, **kept}


def try_changes(
    recipe: Recipe, request: TraceRequest, number: int, ranks_of: RanksOf, measure: Measure, gpu: Gpu
) -> list[Tried]:
    """The dry runs of at most `number` changes that plans choose for `gpu`, best first: what fits before what does not,
    what trains the same before what does not, then the fastest."""

    def with_overrides(more: Sequence[str]) -> object:
        return load(replace(request, overrides=(*request.overrides, *more)))

    _, found = plan_changes(recipe, with_overrides, request.num_gpus)
    chosen = list(_most_promising(found, with_overrides, request.num_gpus, _limit(gpu)))[:number]
    return sorted((_tried(one, request, ranks_of, measure) for one in chosen), key=_order)


def _most_promising(
    found: Sequence[Planned], with_overrides: WithOverrides, num_gpus: int, limit: float
) -> Iterator[Planned]:
    """By plan: what fits alone, cheapest first; else all that train the same together, as far as they are legal, and
    then what needs the least."""
    alone = [one for one in found if one.plan.heaviest <= limit]
    yield from alone
    if not any(one.change.same_training for one in alone):
        together = _together([one for one in found if one.change.same_training], with_overrides, num_gpus, limit)
        if together is not None:
            yield together
    yield from sorted((one for one in found if one not in alone), key=lambda one: one.plan.heaviest)


def _together(found: Sequence[Planned], with_overrides: WithOverrides, num_gpus: int, limit: float) -> Planned | None:
    """Changes on top of each other, in their order, until the plan fits. A key is set once: the last word holds."""
    best: Planned | None = None
    for one in found:
        words = (*(best.change.overrides if best else ()), *one.change.overrides)
        change = Change(tuple({word.partition("=")[0]: word for word in words}.values()))
        more = plan_change(change, with_overrides, num_gpus)
        if more is not None and (best is None or more.plan.heaviest < best.plan.heaviest):
            best = more
        if best is not None and best.plan.heaviest <= limit:
            break
    return best if best is not None and len(best.change.overrides) > 1 else None


def _tried(one: Planned, request: TraceRequest, ranks_of: RanksOf, measure: Measure) -> Tried:
    heaviest = max(range(len(one.plan.memory)), key=lambda rank: one.plan.memory[rank].total)
    asked = replace(request, overrides=(*request.overrides, *one.change.overrides))
    try:
        return Tried(one.change, measure(asked, ranks_of(one.plan.request.layout, heaviest)))
    except (ConfigError, RunError) as error:  # it has no kernels that a dry run reaches, or the step fails
        return Tried(one.change, None, error.message.splitlines()[0])


def _order(tried: Tried) -> tuple[bool, bool, bool, float]:
    found = tried.found
    if found is None:
        return True, True, True, 0.0
    return False, not found.fits, not tried.change.same_training, -found.tokens_per_second_per_gpu


def _limit(gpu: Gpu) -> float:
    return usable_bytes(gpu.memory_gib)
