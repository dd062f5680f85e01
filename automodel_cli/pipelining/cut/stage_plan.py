"""Plan the stages of a pipeline: the layers of each stage and its rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.layer_ranges import (
    balanced_sizes,
    even_sizes,
    layer_ranges,
    ranges_from_names,
    stage_count,
)
from automodel_cli.pipelining.cut.layout_string import parse_layout, validate_layout
from automodel_cli.pipelining.cut.model_structure import ModelStructure, tied_embedding
from automodel_cli.pipelining.cut.stage_costs import lowest_with_backward, training_costs
from automodel_cli.pipelining.schedule.program import Program, Step, forward_only_program
from automodel_cli.pipelining.schedule.programs import build_program
from automodel_cli.pipelining.schedule.stage_ranks import stage_owners


@dataclass(frozen=True)
class StagePlan:
    """The stages of a running pipeline.

    Attributes:
        layers: decoder layers of each stage.
        owner: rank of each stage.
        depths: stage with the layers for multi-token prediction, if the model has them.
        lowest: lowest decoder layer with a backward. -1 if anything before the layers is trained, the number of layers
            if only the head is.
    """

    layers: tuple[range, ...]
    owner: tuple[int, ...]
    config: PipelineConfig
    csv_program: Program | None = None
    depths: int | None = None
    lowest: int = 0

    def follows_depths(self, stage: int) -> bool:
        """Return whether this stage receives hidden states of multi-token prediction in addition to the model's."""
        return self.depths is not None and stage > self.depths

    def role_of_depths(self, stage: int) -> int:
        """Return 1 for the stage with layers for multi-token prediction, 2 for later stages, else 0."""
        return 1 if stage == self.depths else 2 if self.follows_depths(stage) else 0

    @property
    def pp_size(self) -> int:
        return max(self.owner) + 1

    @property
    def num_stages(self) -> int:
        return len(self.owner)

    def of_rank(self, rank: int) -> list[int]:
        """Return the stages of a rank, in pipeline order."""
        return [stage for stage, owner in enumerate(self.owner) if owner == rank]

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are separate actions."""
        return _splits_backward(self.config, self.csv_program)

    def lowest_backward(self, stage: int) -> int:
        """Return the lowest decoder layer that has a backward, as seen by this stage.

        torch splits a backward between the inputs of a stage and its weights, so it needs gradients of the inputs.
        """
        return self.layers[stage].start if stage > 0 and self.splits_backward else self.lowest

    def sends_gradients(self, stage: int) -> bool:
        """Return whether a stage computes gradients of its inputs, for trained parameters before it."""
        return self.splits_backward or self.follows_depths(stage) or self.lowest < self.layers[stage].start

    def check(self, num_microbatches: int) -> None:
        """Raise ConfigError if a step cannot have this number of microbatches."""
        if self.csv_program is not None:
            if num_microbatches != self.csv_program.num_microbatches:
                raise ConfigError(
                    f"schedule_csv={self.config.schedule_csv} runs {self.csv_program.num_microbatches} microbatches "
                    f"per step, not {num_microbatches}",
                    code="invalid_schedule",
                    keys=("schedule_csv",),
                    fix=f"{self.csv_program.num_microbatches} microbatches per step (train.global_batch_size)",
                )
            return
        self.config.check(self.pp_size, num_microbatches, self.num_stages // self.pp_size)

    def program(self, num_microbatches: int) -> Program:
        """Return the program of one training step. Raises ConfigError as `check` does."""
        self.check(num_microbatches)
        if self.csv_program is not None:
            return self.csv_program
        assert self.config.named_schedule is not None
        return build_program(
            self.config.named_schedule,
            self.pp_size,
            num_microbatches,
            self.num_stages // self.pp_size,
            group_size=self.config.microbatch_group_size,
        )

    def forward_program(self, num_microbatches: int) -> Program:
        """Return a program of forwards over any number of microbatches, on any placement."""
        empty: tuple[tuple[Step, ...], ...] = ((),) * self.pp_size
        return forward_only_program(Program("forward", num_microbatches, self.owner, empty))


def plan_stages(config: PipelineConfig, part: ModelPart, anatomy: ModelStructure, pp_size: int) -> StagePlan:
    """Plan the stages of `part` on `pp_size` ranks. The part is not changed. Raises ConfigError."""
    csv_program = config.read_program()
    if csv_program is not None and csv_program.pp_size != pp_size:
        raise ConfigError(
            f"schedule_csv={config.schedule_csv} has {csv_program.pp_size} rows (one per rank), but pp_size={pp_size}",
            code="stage_count",
            keys=("schedule_csv",),
            fix=f"mesh.pp_size={csv_program.pp_size}",
        )
    layers = _layers(config, part, anatomy, pp_size, csv_program)
    _check_first_stage(layers, part, pp_size)
    depths = _stage_of_depths(config, part, anatomy, len(layers))
    plan = replace(_owned(config, layers, depths, pp_size, csv_program), lowest=lowest_with_backward(part, anatomy))
    if depths is not None:
        _check_uses_of_table(plan, part)
    return plan


def _splits_backward(config: PipelineConfig, csv_program: Program | None) -> bool:
    if csv_program is not None:
        return csv_program.splits_backward
    assert config.named_schedule is not None
    return config.named_schedule.splits_backward


def _owned(
    config: PipelineConfig, layers: list[range], depths: int | None, pp_size: int, csv_program: Program | None
) -> StagePlan:
    if csv_program is not None:
        if csv_program.num_stages != len(layers):
            raise ConfigError(
                f"schedule_csv={config.schedule_csv} runs {csv_program.num_stages} stages, but the model is split into "
                f"{len(layers)}",
                code="stage_count",
                keys=("schedule_csv",),
            )
        return StagePlan(tuple(layers), csv_program.owner, config, csv_program, depths)
    assert config.named_schedule is not None
    owners = stage_owners(pp_size, len(layers), config.named_schedule.style)
    return StagePlan(tuple(layers), owners, config, depths=depths)


def _stage_of_depths(config: PipelineConfig, part: ModelPart, anatomy: ModelStructure, num_stages: int) -> int | None:
    """Return the stage of `m` in the layout. Without a layout, it is the stage of the head."""
    if part.multi_token is None:
        return None
    if config.layout is None:
        return num_stages - 1
    # Example: "Et|t|m|L" has four stages. The multi-token prediction layer is stage 2.
    stage = next(s for s, letters in enumerate(parse_layout(config.layout).letters) if "m" in letters)
    if stage < num_stages - 1 and anatomy.streams:
        raise ConfigError(
            "layout with m before the last stage is not supported because the layers return several residual streams",
            code="not_supported_by_model",
            keys=("layout",),
            fix="layout=null",
        )
    return stage


def _check_first_stage(layers: list[range], part: ModelPart, pp_size: int) -> None:
    """Raise ConfigError if layers of a later stage read features of pictures, which only the first stage has."""
    needed, total, given = part.first_layers, layers[-1].stop, len(layers[0])
    if given >= needed:
        return
    rest = total - needed
    fix = "mesh.pp_size=1 pipeline=null"
    if rest >= len(layers) - 1 > 0:
        sizes = [needed, *even_sizes(len(layers) - 1, rest)]
        fix = f"layout='E{'|'.join(f't*{size}' for size in sizes)}L' layers_per_stage=null"
    raise ConfigError(
        f"the first stage has {given} of {total} decoder layers, but {type(part.model).__name__} needs {needed}, "
        "because its first layers add features of pictures, which only the first stage computes",
        code="stage_count",
        keys=("layout", "layers_per_stage", "pp_size"),
        fix=fix,
    )


def _check_uses_of_table(plan: StagePlan, part: ModelPart) -> None:
    """Raise ConfigError if a split backward would compute a wrong gradient of the embedding.

    torch finds weight gradients of a split backward where weights meet the path of the inputs. It counts a weight that
    meets this path twice in a row too often.
    """
    is_head = plan.depths == plan.num_stages - 1 and tied_embedding(part.model) is not None
    uses = len(part.multi_token or ()) + is_head
    if plan.splits_backward and uses > 1:
        raise ConfigError(
            f"schedule={plan.config.schedule_csv or plan.config.schedule} is not supported because a split backward "
            f"is not exact for the embedding, which the stage with the layers for multi-token prediction uses {uses} "
            "times",
            code="not_supported_by_model",
            keys=("schedule", "schedule_csv"),
            fix="schedule=1f1b schedule_csv=null",
        )


def _layers(
    config: PipelineConfig, part: ModelPart, anatomy: ModelStructure, pp_size: int, csv_program: Program | None
) -> list[range]:
    num_layers = len(part.model.get_submodule(anatomy.layers)._modules)
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
        if layout.count("m") and part.multi_token is None:
            raise ConfigError(
                f"layout places {layout.count('m')} multi-token-prediction layers (m), but "
                f"{type(part.model).__name__} has none. model.mtp adds them",
                code="not_supported_by_model",
                keys=("layout",),
                fix="layout=null, or a layout without m",
            )
        validate_layout(layout, pp_size, num_layers, len(part.multi_token or ()))
        # Example: "Et*2|t*3|tL" has 2, 3 and 1 decoder layers.
        counts = [letters.count("t") for letters in layout.letters]
        if kind == "single":
            _check_count(len(counts), pp_size, kind)
        return layer_ranges(counts)
    if csv_program is not None:
        count = csv_program.num_stages
    else:
        assert kind is not None
        rounding = config.round_virtual_stages_to_pp_multiple
        count, _ = stage_count(num_layers, config.layers_per_stage, pp_size, kind, rounding)
    splits = _splits_backward(config, csv_program)
    sizes, needed = _sizes(config.balance, count, num_layers, part, anatomy, splits_backward=splits), part.first_layers
    # The first stage must contain the layers that read picture features. The other layers are split evenly behind it.
    if config.layers_per_stage is None and sizes[0] < needed and num_layers - needed >= count - 1:
        sizes = [needed, *even_sizes(count - 1, num_layers - needed)]
    return layer_ranges(sizes)


def _check_count(count: int, pp_size: int, kind: str | None) -> None:
    key = "module_fqns_per_model_part"
    if count % pp_size or (kind == "single" and count != pp_size):
        rule = "equally many per rank" if count % pp_size else "exactly one per rank for this schedule"
        raise ConfigError(
            f"{count} stages are not supported on pp_size={pp_size} ranks: the schedule needs {rule}",
            code="stage_count",
            keys=(key,),
            fix=f"{key}=null, or {pp_size} stages",
        )


def _sizes(
    balance: str, count: int, num_layers: int, part: ModelPart, anatomy: ModelStructure, *, splits_backward: bool
) -> list[int]:
    if balance == "even":
        return even_sizes(count, num_layers)
    if count > num_layers:
        even_sizes(count, num_layers)  # Raises the error with its fix.
    # A split backward computes input gradients in every layer behind the first stage.
    costs, head = training_costs(part, anatomy, 0 if splits_backward else lowest_with_backward(part, anatomy))
    # The head counts for the last stage, so that it gets fewer layers.
    return balanced_sizes(costs, count, head_cost=head)
