"""Compare pipeline schedules: stages, programs and timelines of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.model_structure import ModelStructure
from automodel_cli.pipelining.cut.stage_plan import StagePlan, plan_stages
from automodel_cli.pipelining.schedule.schedules import SCHEDULES, Schedule
from automodel_cli.pipelining.timeline.simulator import Costs, Timeline, simulate


@dataclass(frozen=True)
class Comparison:
    """One line of the schedule comparison: a timeline, or why the schedule cannot run here."""

    schedule: Schedule
    num_chunks: int
    timeline: Timeline | None
    refusal: str | None = None


@dataclass(frozen=True)
class StagePlanner:
    """Cuts one model for one pipeline, any schedule. `costs` times the stages of a cut."""

    part: ModelPart
    anatomy: ModelStructure
    costs: Callable[[StagePlan], Costs]
    pp_size: int
    num_microbatches: int

    def stage_plan(self, config: PipelineConfig) -> StagePlan:
        return plan_stages(config, self.part, self.anatomy, self.pp_size)

    def timeline(self, plan: StagePlan) -> Timeline:
        return simulate(plan.program(self.num_microbatches), self.costs(plan))

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
            # A layout or split of the config has a fixed number of stages, which other kinds of schedules do not
            # accept.
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
