"""From the options of a pipeline to its stages: which layers each holds and which rank runs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.nf4 import NF4Linear
from automodel_cli.models.part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.anatomy import Anatomy
from automodel_cli.pipelining.cut.layout_string import parse_layout, validate_layout
from automodel_cli.pipelining.cut.split import balanced_sizes, even_sizes, layer_ranges, ranges_from_names, stage_count
from automodel_cli.pipelining.schedule.owners import stage_owners
from automodel_cli.pipelining.schedule.program import Program, forward_only_program
from automodel_cli.pipelining.schedule.programs import build_program


@dataclass(frozen=True)
class StagePlan:
    """The stages of a running pipeline. `layers[s]` are the decoder layers of stage s, `owner[s]` its rank."""

    layers: tuple[range, ...]
    owner: tuple[int, ...]
    config: PipelineConfig
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
            return self.csv_program.splits_backward
        assert self.config.named_schedule is not None
        return self.config.named_schedule.splits_backward

    def check(self, num_microbatches: int) -> None:
        """Raises ConfigError, with the rule, for a number of microbatches that a step cannot have."""
        if self.csv_program is not None:
            if num_microbatches != self.csv_program.num_microbatches:
                raise ConfigError(
                    f"{self.config.csv} is a program for {self.csv_program.num_microbatches} microbatches "
                    f"per step, not {num_microbatches}",
                    keys=("csv",),
                    fix=f"{self.csv_program.num_microbatches} microbatches per step (train.global_batch_size)",
                )
            return
        self.config.check(self.pp_size, num_microbatches, self.num_stages // self.pp_size)

    def program(self, num_microbatches: int) -> Program:
        """One training step. Raises ConfigError as `check` does."""
        self.check(num_microbatches)
        if self.csv_program is not None:
            return self.csv_program
        assert self.config.named_schedule is not None
        return build_program(
            self.config.named_schedule,
            self.pp_size,
            num_microbatches,
            self.num_stages // self.pp_size,
            group_size=self.config.group_size(self.pp_size, num_microbatches),
        )

    def forward_program(self, num_microbatches: int) -> Program:
        """A forward pass over any number of microbatches, on any placement."""
        empty: tuple[tuple, ...] = ((),) * self.pp_size
        return forward_only_program(Program("forward", num_microbatches, self.owner, empty))


def plan_stages(config: PipelineConfig, part: ModelPart, anatomy: Anatomy, pp_size: int) -> StagePlan:
    """Cut `part` (not touched here) for `pp_size` ranks. Raises ConfigError for what does not fit together."""
    csv_program = config.read_program()
    if csv_program is not None and csv_program.pp_size != pp_size:
        raise ConfigError(
            f"{config.csv} has {csv_program.pp_size} rows, one per rank, but pp_size={pp_size}",
            keys=("csv",),
            fix=f"mesh.pp_size={csv_program.pp_size}",
        )
    layers = _layers(config, part, anatomy, pp_size, csv_program)
    if csv_program is not None:
        if csv_program.num_stages != len(layers):
            raise ConfigError(
                f"{config.csv} runs {csv_program.num_stages} stages; the model is cut into {len(layers)}",
                keys=("csv",),
            )
        return StagePlan(tuple(layers), csv_program.owner, config, csv_program)
    assert config.named_schedule is not None
    return StagePlan(tuple(layers), stage_owners(pp_size, len(layers), config.named_schedule.style), config)


def _layers(
    config: PipelineConfig, part: ModelPart, anatomy: Anatomy, pp_size: int, csv_program: Program | None
) -> list[range]:
    num_layers = len(part.model.get_submodule(anatomy.layers))  # type: ignore[arg-type]
    kind = config.named_schedule.kind if config.named_schedule else None
    if config.module_fqns_per_model_part is not None:
        _check_count(len(config.module_fqns_per_model_part), pp_size, kind)
        return ranges_from_names(
            config.module_fqns_per_model_part,
            layers_prefix=anatomy.layers,
            num_layers=num_layers,
            module_names=[name for name, _ in part.model.named_modules() if name],
            embedding=anatomy.before[0],
            head=anatomy.after,
        )
    if config.layout is not None:
        layout = parse_layout(config.layout)
        if layout.count("m"):
            raise ConfigError(
                f"layout: it places {layout.count('m')} multi-token-prediction layers (m), but "
                f"{type(part.model).__name__} builds none",
                keys=("layout",),
                fix="layout=null, or a layout without m",
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
        rounding = config.round_virtual_stages_to_pp_multiple
        count, _ = stage_count(num_layers, config.layers_per_stage, pp_size, kind, rounding)  # type: ignore[arg-type]
    return layer_ranges(_sizes(config.balance, count, num_layers, part, anatomy))


def _check_count(count: int, pp_size: int, kind: str | None) -> None:
    key = "module_fqns_per_model_part"
    if count % pp_size or (kind == "single" and count != pp_size):
        rule = "equally many per rank" if count % pp_size else "exactly one per rank for this schedule"
        raise ConfigError(
            f"{count} stages on pp_size={pp_size} ranks: need {rule}",
            keys=(key,),
            fix=f"{key}=null, or {pp_size} stages",
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
