"""Stages, programs and timelines of a config, for its own schedule and for every other one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.part import ModelPart
from automodel_cli.pipelining.anatomy import Anatomy
from automodel_cli.pipelining.schedules import SCHEDULES
from automodel_cli.pipelining.simulator import Comparison, Costs, Timeline, simulate
from automodel_cli.pipelining.stage_plan import Choice, StagePlan, plan_stages
from automodel_cli.planning.units import Units


@dataclass(frozen=True)
class Cutter:
    """Cuts one model for one pipeline, any schedule. `backward` is (input, weight) gradients in forwards."""

    part: ModelPart
    anatomy: Anatomy
    units: Units
    pp_size: int
    num_microbatches: int
    backward: tuple[float, float]

    def stage_plan(self, choice: Choice) -> StagePlan:
        return plan_stages(choice, self.part, self.anatomy, self.pp_size)

    def timeline(self, plan: StagePlan) -> Timeline:
        """Time 1 is a microbatch's forward through a rank's share of the model; stages cost what their weights are."""
        program = plan.program(self.num_microbatches)
        return simulate(program, stage_costs(self.units, plan.layers, self.pp_size, self.backward))

    def balanced(self, choice: Choice) -> Timeline | None:
        """With the stages balanced by cost; None where the user chose them, or has them so already."""
        chosen = choice.layout is not None or choice.module_fqns_per_model_part is not None
        if chosen or choice.balance == "cost":
            return None
        return self.timeline(self.stage_plan(replace(choice, balance="cost")))

    def compare(self, choice: Choice) -> list[tuple[Comparison, StagePlan | None]]:
        """Every schedule, fastest first, refused ones last with the rule.

        Schedules with as many stages per rank as the config's keep its cut; for the others, layers spread evenly.
        """
        own = choice.schedule
        rows: list[tuple[Comparison, StagePlan | None]] = []
        for schedule in SCHEDULES:
            same_kind = own is not None and (own.kind, own.style) == (schedule.kind, schedule.style)
            base = choice if same_kind else Choice(balance=choice.balance)
            keeps_group = own is schedule
            other = replace(
                base,
                pp_schedule=schedule.name,
                pp_schedule_csv=None,
                microbatch_group_size=choice.microbatch_group_size if keeps_group else None,
            )
            chunks = 1 if schedule.kind == "single" else 2
            try:
                plan = self.stage_plan(other)
                row = Comparison(schedule, plan.num_stages // self.pp_size, self.timeline(plan))
                rows.append((row, plan))
            except ConfigError as refusal:
                rows.append((Comparison(schedule, chunks, None, refusal.message), None))
        return sorted(rows, key=lambda pair: pair[0].timeline.makespan if pair[0].timeline else float("inf"))


def stage_costs(units: Units, layers: Sequence[range], pp_size: int, backward: tuple[float, float]) -> Costs:
    """Forward time of each stage in proportion to the weights that a token meets there; 1 is the mean of a rank."""
    last = len(layers) - 1
    weights = [
        sum(units.layers[i].cost for i in held)
        + (units.before.cost if s == 0 else 0.0)
        + (units.after.cost if s == last else 0.0)
        for s, held in enumerate(layers)
    ]
    one = sum(weights) / pp_size
    forward = tuple(weight / one for weight in weights)
    backward_input, backward_weight = (tuple(share * f for f in forward) for share in backward)
    return Costs(forward, backward_input, backward_weight)
