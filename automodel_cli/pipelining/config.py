"""The `pipeline` section of the config. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_range
from automodel_cli.pipelining.schedule.program import Program, read_csv
from automodel_cli.pipelining.schedule.schedules import Schedule, check_schedule, find_schedule

WAYS = ("layout", "module_fqns_per_model_part", "layers_per_stage")


@dataclass(frozen=True)
class PipelineConfig:
    """Partition of the model over `mesh.pp_size` ranks, and the schedule of its microbatches.

    `layers_per_stage`, `layout` and `module_fqns_per_model_part` are alternatives. Without them, layers are spread by
    `balance`.
    """

    schedule: str | None = "1f1b"
    """Schedule by name: gpipe, 1f1b, interleaved_1f1b, looped_bfs, zb_h1, zb_h2, interleaved_zb, zbv, dualpipev, or
    torch's names.
    """
    schedule_csv: str | None = None
    """File with a schedule in torch's compute-only CSV format, instead of `schedule`."""
    layers_per_stage: int | None = None
    """Decoder layers per stage. Sets the number of stages."""
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    """Round the number of stages `up` or `down` if `mesh.pp_size` does not divide it."""
    layout: str | list[list[str]] | None = None
    """Stages in the layout language, for example `Et*3|(tt|)*29,m|L`."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names per stage."""
    balance: Literal["even", "cost"] = "even"
    """Distribution of layers over stages: `even`, or by `cost`, including the head. Frozen parameters cost less."""
    microbatch_group_size: int | None = None
    """Microbatches per chunk and round of interleaved_1f1b. null: torch's grouping."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the tensors between stages. null: the compute dtype."""

    def __post_init__(self) -> None:
        if self.schedule is None and self.schedule_csv is None:
            raise ConfigError(
                "schedule=null and schedule_csv=null define no order of the microbatches. Set one of them",
                code="missing_key",
                keys=("schedule", "schedule_csv"),
                fix="schedule=1f1b",
            )
        if self.schedule is not None:
            find_schedule(self.schedule)
        _check_cut(self)

    @property
    def named_schedule(self) -> Schedule | None:
        """The schedule by name, or None with a CSV file."""
        if self.schedule_csv is not None:
            return None
        assert self.schedule is not None
        return find_schedule(self.schedule)

    def read_program(self) -> Program | None:
        """Return the program of the CSV file, or None without one. Raises ConfigError."""
        return None if self.schedule_csv is None else read_csv(self.schedule_csv)

    def check(self, pp_size: int, num_microbatches: int, num_chunks: int | None = None) -> None:
        """Raise ConfigError if the schedule does not support this number of microbatches. Called before launch.

        Args:
            num_chunks: stages per rank. None: the minimum of the schedule, if only the model determines the number
                (`layers_per_stage`). CSV files are checked when the model is split.
        """
        schedule = self.named_schedule
        if schedule is None:
            return
        chunks = num_chunks or (1 if schedule.kind == "single" else 2)
        check_schedule(schedule, pp_size, num_microbatches, chunks, self.microbatch_group_size)


def _check_cut(config: PipelineConfig) -> None:
    """Raise ConfigError if several ways to choose stages are set, or for values that are invalid for any model."""
    given = [name for name in WAYS if getattr(config, name) is not None]
    if len(given) > 1:
        others = " ".join(f"{name}=null" for name in given[1:])
        raise ConfigError(
            f"{' and '.join(given)} cannot be set together", code="mutually_exclusive", keys=given, fix=others
        )
    check_range("layers_per_stage", config.layers_per_stage, at_least=1, fix="layers_per_stage=null")
    rounding = config.round_virtual_stages_to_pp_multiple
    if rounding not in (None, "up", "down"):
        key = "round_virtual_stages_to_pp_multiple"
        raise ConfigError(
            f"{key}={rounding!r} must be one of: up, down, null", code="invalid_choice", keys=(key,), fix=f"{key}=up"
        )
    check_choice("balance", config.balance, ("even", "cost"), fix="balance=even")
    check_range("microbatch_group_size", config.microbatch_group_size, at_least=1, fix="microbatch_group_size=null")
