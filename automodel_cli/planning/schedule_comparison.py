"""Compare pipeline schedules: stages, programs and timelines of a config."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.model_structure import ModelStructure
from automodel_cli.pipelining.cut.stage_plan import StagePlan, plan_stages
from automodel_cli.pipelining.schedule.schedules import SCHEDULES, Schedule
from automodel_cli.pipelining.timeline.simulator import Costs, Timeline, simulate
from automodel_cli.planning.layer_costs import Units


@dataclass(frozen=True)
class Comparison:
    """One line of the schedule comparison: a timeline, or why the schedule cannot run here."""

    schedule: Schedule
    num_chunks: int
    timeline: Timeline | None
    refusal: str | None = None


@dataclass(frozen=True)
class StagePlanner:
    """Cuts one model for one pipeline, any schedule. `backward` is (input, weight) gradients in forwards."""

    part: ModelPart
    anatomy: ModelStructure
    units: Units
    pp_size: int
    num_microbatches: int
    backward: tuple[float, float]

    def stage_plan(self, config: PipelineConfig) -> StagePlan:
        return plan_stages(config, self.part, self.anatomy, self.pp_size)

    def timeline(self, plan: StagePlan) -> Timeline:
        """Time 1 is a microbatch's forward through a rank's share of the model; stages cost what their weights are."""
        program = plan.program(self.num_microbatches)
        return simulate(program, stage_costs(self.units, plan, self.backward))

    def balanced(self, config: PipelineConfig) -> Timeline | None:
        """With the stages balanced by cost; None where the user chose them, or has them so already."""
        chosen = config.layout is not None or config.module_fqns_per_model_part is not None
        if chosen or config.balance == "cost":
            return None
        return self.timeline(self.stage_plan(replace(config, balance="cost")))

    def compare(self, config: PipelineConfig) -> list[tuple[Comparison, StagePlan | None]]:
        """Every schedule, fastest first, refused ones last with the rule.

        Schedules with as many stages per rank as the config's keep its cut; for the others, layers spread evenly.
        """
        own = config.named_schedule
        rows: list[tuple[Comparison, StagePlan | None]] = []
        for schedule in SCHEDULES:
            same_kind = own is not None and (own.kind, own.style) == (schedule.kind, schedule.style)
            base = config if same_kind else PipelineConfig(balance=config.balance)
            keeps_group = own is schedule
            other = replace(
                base,
                schedule=schedule.name,
                schedule_csv=None,
                microbatch_group_size=config.microbatch_group_size if keeps_group else None,
            )
            chunks = 1 if schedule.kind == "single" else 2
            try:
                plan = self.stage_plan(other)
                row = Comparison(schedule, plan.num_stages // self.pp_size, self.timeline(plan))
                rows.append((row, plan))
            except ConfigError as refusal:
                rows.append((Comparison(schedule, chunks, None, refusal.message), None))
        return sorted(rows, key=lambda pair: pair[0].timeline.makespan if pair[0].timeline else float("inf"))


def stage_costs(units: Units, plan: StagePlan, backward: tuple[float, float]) -> Costs:
    """Forward time of each stage in proportion to the weights that a token meets there; 1 is the mean of a rank."""
    weights = [
        units.cost_of_stage(held, is_first=s == 0, is_last=s == plan.num_stages - 1, depths=plan.role_of_depths(s))
        for s, held in enumerate(plan.layers)
    ]
    one = sum(weights) / plan.pp_size
    forward = tuple(weight / one for weight in weights)
    backward_input, backward_weight = (tuple(share * f for f in forward) for share in backward)
    return Costs(forward, backward_input, backward_weight)
