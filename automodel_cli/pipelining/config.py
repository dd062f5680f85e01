"""The `pipeline` section of the YAML. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.runtime_choice import RuntimeChoice
from automodel_cli.pipelining.schedules import check_schedule, find_schedule

WAYS = ("layout", "module_fqns_per_model_part", "layers_per_stage")


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut over `mesh.pp_size` ranks and in which order the microbatches run.

    schedule: gpipe, 1f1b, interleaved_1f1b, looped_bfs, zb_h1, interleaved_zb, zbv, dualpipev, ... (or torch's names).
    csv: a program in torch's compute-only format, in place of a schedule.
    layers_per_stage: fixes the number of stages; `round_virtual_stages_to_pp_multiple` repairs one that does not
        divide.
    layout: the layout language, for example `Et*3|(tt|)*29,m|L`.
    module_fqns_per_model_part: module names per stage.
    balance: how layers spread where only their number is known: "even", or "cost" with the head weighed.
    microbatch_group_size: microbatches per chunk and round of interleaved_1f1b; null is torch's grouping.
    dtype: of the tensors between stages; null is what the model computes in.
    runtime: "torch" executes every schedule on torch.distributed.pipelining; "eager" executes 1f1b and interleaved_1f1b
        with Megatron-core's functions, to the same losses and gradients, and releases what it has sent. Options of the
        eager runtime: overlap_p2p_comm posts receives early, in interleaved_1f1b and where the microbatches of a step
        are equally long; num_microbatches_with_partial_activation_checkpoints is how many of the microbatches that are
        alive at once keep their activations (the others are recomputed), null leaves that to the parallelizer.
    """

    schedule: str | None = "1f1b"
    csv: str | None = None
    layers_per_stage: int | None = None
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    layout: str | list[list[str]] | None = None
    module_fqns_per_model_part: list[list[str]] | None = None
    balance: Literal["even", "cost"] = "even"
    microbatch_group_size: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    runtime: Literal["torch", "eager"] = "torch"
    overlap_p2p_comm: bool = False
    num_microbatches_with_partial_activation_checkpoints: int | None = None

    def __post_init__(self) -> None:
        if self.schedule is None and self.csv is None:
            raise ConfigError(
                "neither schedule nor csv is given", keys=("schedule", "csv"), fix="pipeline.schedule=1f1b"
            )
        if self.schedule is not None:
            try:
                find_schedule(self.schedule)
            except ConfigError as error:
                fix = error.fix and error.fix.replace("pp_schedule", "pipeline.schedule")
                raise ConfigError(
                    error.message.replace("pp_schedule", "schedule"), keys=("schedule",), fix=fix
                ) from None
        check_one_way(self)
        self._runtime_choice().check(self.schedule, self.csv)

    def _runtime_choice(self) -> RuntimeChoice:
        return RuntimeChoice(
            self.runtime, self.overlap_p2p_comm, self.num_microbatches_with_partial_activation_checkpoints
        )

    def check(self, pp_size: int, num_microbatches: int) -> None:
        """Refuse, before anything is launched, a number of microbatches that the schedule cannot run.

        The stages per rank that only the model decides (`layers_per_stage`) are taken as the schedule's fewest.
        """
        if self.csv is not None:
            return
        assert self.schedule is not None
        schedule = find_schedule(self.schedule)
        chunks = 1 if schedule.kind == "single" else 2
        check_schedule(schedule, pp_size, num_microbatches, chunks, self.group_size(pp_size, num_microbatches))

    def group_size(self, pp_size: int, num_microbatches: int) -> int | None:
        """Microbatches per chunk and round, as the runtime takes it; null is torch's grouping."""
        return self._runtime_choice().group_size(self.schedule, pp_size, num_microbatches, self.microbatch_group_size)

    def options(self) -> dict[str, Any]:
        """The keywords of `AutoPipeline` that this section sets."""
        return {
            "pp_schedule": self.schedule,
            "pp_schedule_csv": self.csv,
            "layers_per_stage": self.layers_per_stage,
            "round_virtual_stages_to_pp_multiple": self.round_virtual_stages_to_pp_multiple,
            "layout": self.layout,
            "module_fqns_per_model_part": self.module_fqns_per_model_part,
            "balance": self.balance,
            "microbatch_group_size": self.microbatch_group_size,
            "dtype": self.dtype,
            "runtime": self.runtime,
            "overlap_p2p_comm": self.overlap_p2p_comm,
            "num_microbatches_with_partial_activation_checkpoints": (
                self.num_microbatches_with_partial_activation_checkpoints
            ),
        }


def check_one_way(options: Any) -> None:
    """At most one of the ways to choose the stages; the values that need no model are checked. Raises ConfigError."""
    given = [name for name in WAYS if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", keys=given, fix=f"keep {given[0]} only")
    if options.layers_per_stage is not None and options.layers_per_stage < 1:
        raise ConfigError(
            f"layers_per_stage={options.layers_per_stage} must be at least 1",
            keys=("layers_per_stage",),
            fix="layers_per_stage=1",
        )
    rounding = options.round_virtual_stages_to_pp_multiple
    if rounding not in (None, "up", "down"):
        key = "round_virtual_stages_to_pp_multiple"
        raise ConfigError(f"{key}={rounding!r} must be 'up', 'down' or null", keys=(key,), fix=f"{key}=up")
    if options.microbatch_group_size is not None and options.microbatch_group_size < 1:
        raise ConfigError(
            f"microbatch_group_size={options.microbatch_group_size} must be at least 1",
            keys=("microbatch_group_size",),
            fix="microbatch_group_size=null",
        )
