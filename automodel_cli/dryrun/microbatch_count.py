"""How many microbatches of a step are traced."""

from __future__ import annotations

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.timeline.simulator import peak_activations
from automodel_cli.planning.plan import Plan
from automodel_cli.run.recipe import Recipe

_UNLIKE = 2  # microbatches of a step: the first one begins the sums of gradients, the last one ends them
_PER_STAGE = 2
"""Microbatches per stage of a pipeline: some after its ramp, in which all do the same."""
_MEAN_OF = 6  # where microbatches do not hold as much as each other


def number_to_run(recipe: Recipe, plan: Plan, asked: int | None, *, alike: bool = True) -> int:
    """Microbatches of the measured step: `asked`, or those that show what the config's step does. All but the first and
    the last do the same, if their rows are alike; a pipeline's must keep as many alive at once. Raises ConfigError for
    what a schedule cannot run.
    """
    count, pp = plan.request.num_microbatches, plan.request.layout.pp
    if pp == 1:
        return asked or min(count, _UNLIKE + (1 if alike else _MEAN_OF))
    if asked is None:
        enough = (
            n for n in range(_PER_STAGE * pp, count) if _can_run(plan, n) and alive(plan, n) == alive(plan, count)
        )
        return next(enough, count)
    if not _can_run(plan, asked):
        assert recipe.pipeline is not None
        near = next((n for n in range(asked, count) if _can_run(plan, n)), count)
        raise ConfigError(
            f"--microbatches {asked} is not supported by {recipe.pipeline.schedule or recipe.pipeline.schedule_csv}",
            code="unsupported_combination",
            keys=("--microbatches", "pipeline"),
            fix=f"--microbatches {near}",
        )
    return asked


def smallest(plan: Plan, most: int) -> int:
    """Of microbatches that a step can have which is not measured; it can have `most`."""
    if plan.cut is None:
        return min(_UNLIKE, max(most - 1, 1))
    return next((number for number in range(_UNLIKE, most) if _can_run(plan, number)), most)


def _can_run(plan: Plan, number: int) -> bool:
    assert plan.cut is not None, "only a schedule refuses a number of microbatches"
    try:
        plan.cut.check(number)
    except ConfigError:
        return False
    return True


def alive(plan: Plan, number: int) -> tuple[float, ...]:
    """Microbatches on each pipeline rank at the worst moment of a step of so many."""
    assert plan.cut is not None, "without a schedule it is one"
    return peak_activations(plan.cut.program(number))
