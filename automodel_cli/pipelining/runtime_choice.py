"""Which runtime executes a pipeline, its options, and what it refuses. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedules import find_schedule

EAGER_SCHEDULES = ("1F1B", "Interleaved1F1B")


@dataclass(frozen=True)
class RuntimeChoice:
    """The runtime by name and, for the eager one, its options; see `PipelineConfig`."""

    name: str = "torch"
    overlap_p2p_comm: bool = False
    num_microbatches_with_partial_activation_checkpoints: int | None = None

    def check(self, schedule: str | None, csv: str | None) -> None:
        """Raises ConfigError for a schedule that the runtime does not have, and for options that would do nothing."""
        if self.name not in ("torch", "eager"):
            raise ConfigError(f"runtime={self.name!r} must be 'torch' or 'eager'", keys=("runtime",), fix=_TORCH)
        partial = self.num_microbatches_with_partial_activation_checkpoints
        if self.name == "torch":
            for key, given in (
                ("overlap_p2p_comm", self.overlap_p2p_comm),
                ("num_microbatches_with_partial_activation_checkpoints", partial is not None),
            ):
                if given:
                    raise ConfigError(
                        f"{key} is an option of the eager runtime, and runtime=torch",
                        keys=(key, "runtime"),
                        fix="pipeline.runtime=eager",
                    )
            return
        if csv is not None or schedule is None:
            raise ConfigError(
                "the eager runtime executes 1f1b and interleaved_1f1b, not a program from a CSV file",
                keys=("runtime", "csv"),
                fix=_TORCH,
            )
        name = find_schedule(schedule).name
        if name not in EAGER_SCHEDULES:
            raise ConfigError(
                f"the eager runtime has the schedules {' and '.join(EAGER_SCHEDULES)}, not {name}",
                keys=("runtime", "schedule"),
                fix=f"{_TORCH}, or pipeline.schedule=interleaved_1f1b",
            )
        if self.overlap_p2p_comm and name == "1F1B":
            raise ConfigError(
                "overlap_p2p_comm: 1F1B needs every tensor at once, only interleaved chunks leave time between",
                keys=("overlap_p2p_comm",),
                fix="pipeline.overlap_p2p_comm=false, or pipeline.schedule=interleaved_1f1b",
            )
        if partial is not None and partial < 0:
            raise ConfigError(
                f"num_microbatches_with_partial_activation_checkpoints={partial} must be at least 0",
                keys=("num_microbatches_with_partial_activation_checkpoints",),
                fix="pipeline.num_microbatches_with_partial_activation_checkpoints=null",
            )

    def group_size(
        self, schedule: str | None, pp_size: int, num_microbatches: int, group_size: int | None
    ) -> int | None:
        """Microbatches per chunk and round of a training step: the user's choice, else the torch runtime's grouping.

        Raises ConfigError where the eager Interleaved1F1B cannot run a number of microbatches that torch's can.
        """
        if self.name != "eager" or schedule is None or find_schedule(schedule).name != "Interleaved1F1B":
            return group_size
        if num_microbatches < pp_size:
            raise ConfigError(
                f"the eager Interleaved1F1B needs at least pp_size={pp_size} microbatches, not {num_microbatches}: "
                "a rank would wait for its own output",
                keys=("num_microbatches", "runtime"),
                fix=f"{_TORCH}, or {pp_size} microbatches per step (train.global_batch_size)",
            )
        return group_size or num_microbatches // (num_microbatches // pp_size)


_TORCH = "pipeline.runtime=torch"
