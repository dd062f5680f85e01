"""The `train` section: length of a run, size of a step, and trained parameters. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.parameter_patterns import Selection, check_syntax
from automodel_cli.config.value_checks import check_choice, check_positive, check_range


@dataclass(frozen=True)
class BatchSizeRamp:
    """Smaller batches at the start of a run, as in GPT-3 and Megatron-LM's `rampup_batch_size`.

    The batch grows from `start` to `train.global_batch_size` in equal steps of `increment`, spread evenly over the
    first `rows` sequences. The size depends on the number of sequences so far, so a resumed run continues the ramp.

    Example: start 32, increment 32 and `rows` 96,000 with a `global_batch_size` of 128: 32 sequences a step for the
    first 32,000, then 64, then 96, and 128 from sequence 96,000 on.
    """

    start: int
    """Sequences of the first step."""
    increment: int
    """Growth of the batch. It divides the difference of `train.global_batch_size` and `start`."""
    rows: int
    """Sequences over which the batch grows."""

    def __post_init__(self) -> None:
        check_positive("train.batch_size_ramp", start=self.start, increment=self.increment, rows=self.rows)

    def sizes(self, full: int) -> list[int]:
        """Return all sizes, in ascending order, up to `full`."""
        return [*range(self.start, full, self.increment), full]

    def size(self, position: int, full: int) -> int:
        """Return the size of the step that begins after `position` sequences."""
        below = self.sizes(full)[:-1]
        return below[position * len(below) // self.rows] if position < self.rows else full


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run and size of a step.

    - A step trains on `global_batch_size` sequences over all ranks, in microbatches of `microbatch_size`. The number of
      accumulation steps follows from both. Example: 32 sequences, 4 data-parallel ranks and microbatches of 2 give 4
      microbatches per rank.
    - The run ends at `max_steps` or after `epochs`. The last one set wins: the command line over files, a file over its
      defaults. If both are set in the same place, the run ends at the one reached first.
    - `step_timeout_seconds=auto` is ten times the slowest step so far, at least 300. The first step (compilation),
      validations and checkpoints have 25 minutes in any case.
    """

    global_batch_size: int
    """Sequences per optimizer step over all ranks. In a recipe with rollouts: samples per update."""
    microbatch_size: int = 1
    """Sequences per forward pass on one data-parallel rank."""
    batch_size_ramp: BatchSizeRamp | None = None
    """Start with smaller batches: `{start: 32, increment: 32, rows: 96000}`. null: the same size at every step."""
    max_steps: int | None = None
    """Number of steps. null: `epochs` sets the length."""
    epochs: float | None = None
    """Number of passes over the data. null: `max_steps` sets the length."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient norm to this. null: no clipping; the norm is still measured."""
    deterministic: bool = False
    """Use deterministic kernels only, and a fixed workspace of cuBLAS. Other kernels raise an error."""
    num_cpu_threads: int | None = None
    """CPU threads of torch per rank. null: as the launcher sets."""
    step_timeout_seconds: float | Literal["auto"] | None = "auto"
    """Seconds without progress after which the run prints the stacks of all ranks and ends. null: no limit."""
    extend_schedule: Literal["continue", "restart", "stretch"] | None = None
    """Learning rate of a run that is resumed with another number of steps: `continue` keeps the last rate, `restart`
    starts a new schedule, `stretch` uses the schedule of the new length. null: `stretch`; a finished run requires a
    choice."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that are not trained, as patterns of names: `[embed_tokens, layers.*.mlp, "layers.[0-3]"]`. A pattern
    is a sequence of parts of a name between dots, with shell wildcards, or `re:` and a regular expression that matches
    from the start of the name. Each must match."""
    trainable: list[str] = field(default_factory=list)
    """Train only the parameters that match one of these patterns, except those in `freeze`. Empty: all."""
    max_restarts: int = 0
    """Number of restarts of the ranks of one host after a rank dies, from the newest complete checkpoint."""

    def __post_init__(self) -> None:
        check_positive(
            "train",
            num_cpu_threads=self.num_cpu_threads,
            global_batch_size=self.global_batch_size,
            microbatch_size=self.microbatch_size,
            max_steps=self.max_steps,
            epochs=self.epochs,
            max_grad_norm=self.max_grad_norm,
            step_timeout_seconds=None if self.step_timeout_seconds == "auto" else self.step_timeout_seconds,
        )
        check_choice(
            "extend_schedule",
            self.extend_schedule,
            ("continue", "restart", "stretch", None),
            fix="train.extend_schedule=restart",
        )
        check_syntax("train.freeze", self.freeze)
        check_syntax("train.trainable", self.trainable)
        check_range("max_restarts", self.max_restarts, at_least=0, fix="train.max_restarts=0")
        if self.max_steps is None and self.epochs is None:
            raise ConfigError(
                "the length of the run is missing: set max_steps or epochs",
                code="missing_key",
                keys=("max_steps", "epochs"),
                fix="train.epochs=1",
            )
        if self.global_batch_size % self.microbatch_size:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"microbatch_size={self.microbatch_size}",
                code="not_divisible",
                keys=("global_batch_size", "microbatch_size"),
                fix=f"train.microbatch_size={self._fitting_microbatch(1)}",
            )
        self._check_ramp()

    @property
    def selection(self) -> Selection:
        """The patterns of trained parameters."""
        return Selection(tuple(self.freeze), tuple(self.trainable))

    @property
    def selects(self) -> bool:
        """Whether some parameters are frozen by name."""
        return bool(self.freeze or self.trainable)

    def _check_ramp(self) -> None:
        ramp, full = self.batch_size_ramp, self.global_batch_size
        if ramp is None:
            return
        if ramp.start >= full or (full - ramp.start) % ramp.increment:
            raise ConfigError(
                f"batch_size_ramp grows from start={ramp.start} by increment={ramp.increment}, which does not reach "
                f"global_batch_size={full}",
                code="out_of_range" if ramp.start >= full else "not_divisible",
                keys=("batch_size_ramp", "global_batch_size"),
                fix=f"train.batch_size_ramp.start={self.microbatch_size} "
                f"train.batch_size_ramp.increment={full - self.microbatch_size}"
                if full > self.microbatch_size
                else "train.batch_size_ramp=null",
            )
        self._check_ramp_fits(1)

    def _check_ramp_fits(self, dp_size: int) -> None:
        """Raise ConfigError if a size of the ramp is not a multiple of the microbatches of all ranks."""
        unit = self.microbatch_size * dp_size
        odd = [size for size in self.batch_sizes if size % unit]
        if odd and self.batch_size_ramp is not None:
            raise ConfigError(
                f"batch_size_ramp has steps of {odd[0]} sequences, not a multiple of microbatch_size="
                f"{self.microbatch_size} x {dp_size} data-parallel ranks = {unit}",
                code="not_divisible",
                keys=("batch_size_ramp", "microbatch_size"),
                fix=f"train.batch_size_ramp.start={unit} train.batch_size_ramp.increment={unit}"
                if self.global_batch_size > unit
                else "train.batch_size_ramp=null",
            )

    @property
    def batch_sizes(self) -> list[int]:
        """All sizes of a step, in ascending order."""
        ramp = self.batch_size_ramp
        return [self.global_batch_size] if ramp is None else ramp.sizes(self.global_batch_size)

    def batch_size(self, position: int) -> int:
        """Return the sequences of the step that begins after `position` sequences."""
        ramp = self.batch_size_ramp
        return self.global_batch_size if ramp is None else ramp.size(position, self.global_batch_size)

    def _fitting_microbatch(self, dp_size: int) -> int:
        """Return the largest valid size up to the configured one. Smaller microbatches do not change the training."""
        of_rank = self.global_batch_size // dp_size
        return next(rows for rows in range(self.microbatch_size, 0, -1) if of_rank % rows == 0)

    def _nearest_global(self, multiple: int) -> int:
        return max(1, round(self.global_batch_size / multiple)) * multiple

    def num_microbatches(self, dp_size: int) -> int:
        """Return the microbatches of one rank in one step, with `dp_size` data-parallel ranks."""
        rows = self.microbatch_size * dp_size
        if self.global_batch_size % rows:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"microbatch_size={self.microbatch_size} x {dp_size} data-parallel ranks = {rows}",
                code="not_divisible",
                keys=("global_batch_size", "microbatch_size"),
                fix=f"train.global_batch_size={self._nearest_global(rows)}"
                if self.global_batch_size % dp_size
                else f"train.microbatch_size={self._fitting_microbatch(dp_size)}",
            )
        self._check_ramp_fits(dp_size)
        return self.global_batch_size // rows

    def num_steps(self, steps_per_epoch: int | None) -> int:
        """Return the optimizer steps of the run. `steps_per_epoch` is known after packing, None for a stream."""
        return self._ends(steps_per_epoch)[0]

    def limit(self, steps_per_epoch: int | None) -> str:
        """Return the key and value that end the run."""
        return self._ends(steps_per_epoch)[1]

    def _ends(self, steps_per_epoch: int | None) -> tuple[int, str]:
        limits = []
        if self.max_steps is not None:
            limits.append((self.max_steps, f"train.max_steps={self.max_steps}"))
        if self.epochs is not None and steps_per_epoch is not None:
            steps = math.ceil(self.epochs * steps_per_epoch - 1e-9)
            limits.append((max(1, steps), f"train.epochs={self.epochs:g}"))
        return min(limits)
