"""From the options of a pipeline to its stages: which layers each holds and which rank runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.nf4 import NF4Linear
from automodel_cli.models.part import ModelPart
from automodel_cli.pipelining.anatomy import Anatomy
from automodel_cli.pipelining.config import check_one_way
from automodel_cli.pipelining.layout import parse_layout, validate_layout
from automodel_cli.pipelining.programs import Program, build_program, forward_only_program, read_csv
from automodel_cli.pipelining.schedules import Schedule, find_schedule
from automodel_cli.pipelining.split import (
    balanced_sizes,
    even_sizes,
    layer_ranges,
    ranges_from_names,
    stage_count,
    stage_owners,
)


@dataclass(frozen=True)
class Choice:
    """What the user said about stages and schedule; see `PipelineConfig` for the meaning of the fields."""

    pp_schedule: str | None = "1f1b"
    pp_schedule_csv: str | None = None
    layers_per_stage: int | None = None
    round_virtual_stages_to_pp_multiple: str | None = None
    layout: str | Sequence[Sequence[str]] | None = None
    module_fqns_per_model_part: Sequence[Sequence[str]] | None = None
    balance: Literal["even", "cost"] = "even"
    microbatch_group_size: int | None = None

    def __post_init__(self) -> None:
        if self.pp_schedule is None and self.pp_schedule_csv is None:
            raise ConfigError(
                "neither pp_schedule nor pp_schedule_csv is given",
                keys=("pp_schedule", "pp_schedule_csv"),
                fix="pp_schedule=1f1b",
            )
        if self.pp_schedule is not None:
            find_schedule(self.pp_schedule)
        if self.balance not in ("even", "cost"):
            raise ConfigError(
                f"balance={self.balance!r} must be 'even' or 'cost'", keys=("balance",), fix="balance=even"
            )
        check_one_way(self)
        self.read_program()

    def read_program(self) -> Program | None:
        """The program of the CSV file, if that is what runs."""
        return None if self.pp_schedule_csv is None else read_csv(self.pp_schedule_csv)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule by name; None when a CSV file says everything."""
        if self.pp_schedule_csv is not None:
            return None
        assert self.pp_schedule is not None
        return find_schedule(self.pp_schedule)


@dataclass(frozen=True)
class StagePlan:
    """The stages of a running pipeline. `layers[s]` are the decoder layers of stage s, `owner[s]` its rank."""

    layers: tuple[range, ...]
    owner: tuple[int, ...]
    choice: Choice
    csv_program: Program | None = None

    @property
    def pp_size(self) -> int:
        return max(self.owner) + 1

    @property
    def num_stages(self) -> int:
        return len(self.owner)

    def of_rank(self, rank: int) -> list[int]:
        """Stage indices of a rank, in pipeline order."""
        return [stage for stage, owner in enumerate(self.owner) if owner == rank]

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are separate actions."""
        if self.csv_program is not None:
            return any(a.kind in "IW" for rank in range(self.pp_size) for a in self.csv_program.actions(rank))
        assert self.choice.schedule is not None
        return self.choice.schedule.splits_backward

    def program(self, num_microbatches: int) -> Program:
        """One training step. Raises ConfigError, with the rule, for a number of microbatches that cannot run."""
        if self.csv_program is not None:
            if num_microbatches != self.csv_program.num_microbatches:
                raise ConfigError(
                    f"{self.choice.pp_schedule_csv} is a program for {self.csv_program.num_microbatches} microbatches "
                    f"per step, not {num_microbatches}",
                    keys=("pp_schedule_csv",),
                    fix=f"{self.csv_program.num_microbatches} microbatches per step (train.global_batch_size)",
                )
            return self.csv_program
        assert self.choice.schedule is not None
        return build_program(
            self.choice.schedule,
            self.pp_size,
            num_microbatches,
            self.num_stages // self.pp_size,
            group_size=self.choice.microbatch_group_size,
        )

    def forward_program(self, num_microbatches: int) -> Program:
        """A forward pass over any number of microbatches, on any placement."""
        empty: tuple[tuple, ...] = ((),) * self.pp_size
        return forward_only_program(Program("forward", num_microbatches, self.owner, empty))


def plan_stages(choice: Choice, part: ModelPart, anatomy: Anatomy, pp_size: int) -> StagePlan:
    """Cut `part` (not touched here) for `pp_size` ranks. Raises ConfigError for what does not fit together."""
    csv_program = choice.read_program()
    if csv_program is not None and csv_program.pp_size != pp_size:
        raise ConfigError(
            f"{choice.pp_schedule_csv} has {csv_program.pp_size} rows, one per rank, but pp_size={pp_size}",
            keys=("pp_schedule_csv",),
            fix=f"mesh.pp_size={csv_program.pp_size}",
        )
    layers = _layers(choice, part, anatomy, pp_size, csv_program)
    if csv_program is not None:
        if csv_program.num_stages != len(layers):
            raise ConfigError(
                f"{choice.pp_schedule_csv} runs {csv_program.num_stages} stages; the model is cut into {len(layers)}",
                keys=("pp_schedule_csv",),
            )
        return StagePlan(tuple(layers), csv_program.owner, choice, csv_program)
    assert choice.schedule is not None
    return StagePlan(tuple(layers), stage_owners(pp_size, len(layers), choice.schedule.style), choice)


def _layers(
    choice: Choice, part: ModelPart, anatomy: Anatomy, pp_size: int, csv_program: Program | None
) -> list[range]:
    num_layers = len(part.model.get_submodule(anatomy.layers))  # type: ignore[arg-type]
    kind = choice.schedule.kind if choice.schedule else None
    if choice.module_fqns_per_model_part is not None:
        _check_count(len(choice.module_fqns_per_model_part), pp_size, kind)
        return ranges_from_names(
            choice.module_fqns_per_model_part,
            layers_prefix=anatomy.layers,
            num_layers=num_layers,
            module_names=[name for name, _ in part.model.named_modules() if name],
            embedding=anatomy.before[0],
            head=anatomy.after,
        )
    if choice.layout is not None:
        layout = parse_layout(choice.layout)
        if layout.count("m"):
            raise ConfigError(
                f"layout: it places {layout.count('m')} multi-token-prediction layers (m), but "
                f"{type(part.model).__name__} builds none",
                keys=("layout",),
                fix="a layout without m",
            )
        validate_layout(layout, pp_size, num_layers)
        counts = [letters.count("t") for letters in layout.letters]
        if kind == "single":
            _check_count(len(counts), pp_size, kind)
        return layer_ranges(counts)
    if csv_program is not None:
        count = csv_program.num_stages
    else:
        assert kind is not None
        rounding = choice.round_virtual_stages_to_pp_multiple
        count, _ = stage_count(num_layers, choice.layers_per_stage, pp_size, kind, rounding)  # type: ignore[arg-type]
    return layer_ranges(_sizes(choice.balance, count, num_layers, part, anatomy))


def _check_count(count: int, pp_size: int, kind: str | None) -> None:
    key = "module_fqns_per_model_part"
    if count % pp_size or (kind == "single" and count != pp_size):
        rule = "equally many per rank" if count % pp_size else "exactly one per rank for this schedule"
        raise ConfigError(
            f"{count} stages on pp_size={pp_size} ranks: need {rule}", keys=(key,), fix=f"{pp_size} stages"
        )


def _sizes(balance: str, count: int, num_layers: int, part: ModelPart, anatomy: Anatomy) -> list[int]:
    if balance == "even":
        return even_sizes(count, num_layers)
    if count > num_layers:
        even_sizes(count, num_layers)  # raises, with the fix
    layers = part.model.get_submodule(anatomy.layers)
    head = sum(used_weights(part.model.get_submodule(name)) for name in anatomy.after)
    return balanced_sizes([used_weights(layer) for layer in layers.children()], count, head_cost=head)


def used_weights(module: nn.Module) -> float:
    """Weights that a token is multiplied with, which its floating-point operations are proportional to.

    Fused experts (`[experts, ...]`) count by the share that a token is sent to; an embedding is a look-up and costs
    nothing.
    """
    total = 0.0
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            continue
        if isinstance(child, NF4Linear):
            total += child.num_weights
        for param in child.parameters(recurse=False):
            experts = getattr(child, "num_experts", None)  # the library's decorator sets it on fused experts
            if experts and param.dim() == 3:
                total += param.numel() * float(child.config.num_experts_per_tok) / experts  # type: ignore
            else:
                total += param.numel()
    return total
