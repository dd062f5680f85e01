"""The node of Megatron-FSDP. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from automodel_cli.config import trust
from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import (
    BuiltInStrategy,
    MemoryTraits,
    check_tp_plan,
    refuse_idle_tp_options,
)

ZERO_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class MegatronFSDPConfig(BuiltInStrategy):
    """Fully sharded data parallelism by NVIDIA's `megatron-fsdp` (extra `megatron`), with tensor and context
    parallelism. It computes in the dtype that parameters are stored in (`model.dtype`).

    `zero_dp_strategy`: what is sharded. 0 "no_shard", 1 "optim" (optimizer state), 2 "optim_grads", 3
    "optim_grads_params". `megatron_fsdp_unit_modules`: import paths of the classes gathered as one; null takes the
    model's own decoder layers. `init_fsdp_with_meta_device`: shard first and fill the shards, so that no rank ever
    holds the whole model; needs a strategy that shards. `tp_plan`: as in FSDP2Config.
    `grad_reduce_in_fp32`: float32 gradients, also on the wire; `preserve_fp32_weights`: the optimizer steps on float32
    copies. Both matter where `model.dtype` is narrower; the defaults keep that dtype.
    `overlap_grad_reduce`, `overlap_param_gather`: communicate while backward and forward compute; strategies that shard
    gradients (2, 3) or parameters (3) cannot do without.
    `disable_bucketing`: one bucket instead of many for what is outside the units. `fsdp_double_buffer`: two persistent
    communication buffers; `nccl_ub`: and registered with NCCL (CUDA).
    `calculate_per_token_loss`: gradients are summed, not averaged. It is so with either value: the loss is divided
    once, by the tokens of the whole step. `check_for_nan_in_grad`: every step is refused, with its rows named, before a
    non-finite gradient reaches the optimizer; that cannot be switched off.
    Refused, because they would change nothing or the numbers: `sequence_parallel`, `activation_checkpointing`,
    `average_in_collective`, `keep_fp8_transpose_cache`.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"tp", "cp"})

    sequence_parallel: bool = False
    """Unsupported with this parallelizer; only false is accepted."""
    tp_plan: Any = field(default=None, metadata=trust.imports())
    """Tensor-parallel plan, as for FSDP2."""
    megatron_fsdp_unit_modules: list[str] | None = field(default=None, metadata=trust.imports())
    """Import paths of the classes that form one FSDP unit. null: the model's decoder layers."""
    zero_dp_strategy: int | str = 3
    """ZeRO stage: nothing is sharded (0), optimizer states (1), gradients too (2), parameters too (3)."""
    init_fsdp_with_meta_device: bool = False
    """Shard first, then fill the shards, so that no rank holds the whole model."""
    grad_reduce_in_fp32: bool = False
    """Keep and reduce gradients in float32."""
    preserve_fp32_weights: bool = False
    """Update float32 copies of the parameters."""
    overlap_grad_reduce: bool = True
    """Reduce gradients during the backward pass. Required if gradients are sharded."""
    overlap_param_gather: bool = True
    """Gather parameters during the forward pass. Required if parameters are sharded."""
    check_for_nan_in_grad: bool = True
    """Only true is accepted: a non-finite gradient always stops the step before the optimizer."""
    average_in_collective: bool = False
    """Unsupported: gradients are summed. Only false is accepted."""
    disable_bucketing: bool = False
    """Use one bucket for parameters outside the units."""
    calculate_per_token_loss: bool = False
    """No effect: gradients are always sums, divided once by the tokens of the step."""
    keep_fp8_transpose_cache: bool = False
    """Unsupported, because parameters are never fp8. Only false is accepted."""
    nccl_ub: bool = False
    """Allocate communication buffers in memory registered with NCCL (CUDA)."""
    fsdp_double_buffer: bool = False
    """Use two persistent communication buffers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (refused, reason) in _MEGATRON_REFUSALS.items():
            value = getattr(self, name)
            is_on = value is True if name == "enable_compile" else bool(value)  # glue is inside of what has hooks
            if is_on is refused:
                raise ConfigError(
                    f"{name}={str(value).lower() if isinstance(value, bool) else value} is not supported with "
                    f"megatron_fsdp: {reason}",
                    code="not_supported",
                    keys=(name,),
                    fix=f"parallelizer.{name}={str(not refused).lower()}",
                )
        check_tp_plan(self.tp_plan)
        strategy = zero_strategy(self.zero_dp_strategy)
        needs_overlap = {"overlap_grad_reduce": ZERO_STRATEGIES[2:], "overlap_param_gather": ZERO_STRATEGIES[3:]}
        for name, strategies in needs_overlap.items():
            if strategy in strategies and not getattr(self, name):
                raise ConfigError(
                    f"{name}=false is not supported with zero_dp_strategy={self.zero_dp_strategy}, which communicates "
                    "during forward and backward",
                    code="unsupported_combination",
                    keys=(name, "zero_dp_strategy"),
                    fix=f"parallelizer.{name}=true",
                )
        if self.init_fsdp_with_meta_device and strategy == "no_shard":
            raise ConfigError(
                "init_fsdp_with_meta_device=true has no effect with zero_dp_strategy=no_shard",
                code="no_effect",
                keys=("init_fsdp_with_meta_device", "zero_dp_strategy"),
                fix="parallelizer.init_fsdp_with_meta_device=false",
            )
        if self.nccl_ub and self.backend != "nccl":
            raise ConfigError(
                f"nccl_ub=true needs backend=nccl, but backend={self.backend}",
                code="requires_setting",
                keys=("nccl_ub", "backend"),
                fix="parallelizer.nccl_ub=false",
            )

    @property
    def name(self) -> str:
        return "megatron_fsdp"

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Refuse what this strategy cannot do on this mesh."""
        super().check_mesh(mesh)
        if self.backend == "gloo":  # means the CPU in any case; with nccl a login node without a GPU may check
            raise ConfigError(
                "parallelizer.backend=gloo is not supported because megatron_fsdp runs on CUDA devices only",
                code="unsupported_combination",
                keys=("parallelizer.backend",),
                fix="parallelizer.backend=nccl, or parallelizer=fsdp2",
            )
        refuse_idle_tp_options(self, ("tp_plan",), mesh)

    def axis_options(self) -> AxisOptions:
        return AxisOptions(self.tp_plan)

    def storage(self) -> MemoryTraits:
        shards = ("optimizer", "gradients", "parameters")[: ZERO_STRATEGIES.index(zero_strategy(self.zero_dp_strategy))]
        return MemoryTraits(frozenset(shards), defers="gradients" not in shards)

    def to_dict(self) -> dict[str, Any]:
        """Field -> value, without `tp_plan`: the documented node takes it at construction only."""
        return {name: value for name, value in super().to_dict().items() if name != "tp_plan"}


_MEGATRON_REFUSALS = {
    "sequence_parallel": (True, "it has no sequence parallelism"),
    "activation_checkpointing": (True, "it gathers the parameters of a unit once and does not support recomputation"),
    "average_in_collective": (True, "gradients are sums over tokens, not means over ranks"),
    "check_for_nan_in_grad": (False, "gradients are always checked before the optimizer step"),
    "keep_fp8_transpose_cache": (True, "no parameters are stored in float8"),
    "enable_compile": (True, "its hooks break the graph of every layer"),
}


def zero_strategy(value: int | str) -> str:
    """0..3 or a name -> the name. Raises ConfigError for anything else, also for names of older documentation."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(ZERO_STRATEGIES):
        return ZERO_STRATEGIES[value]
    if value in ZERO_STRATEGIES:
        return str(value)
    choices = ", ".join(f"{number} = {name}" for number, name in enumerate(ZERO_STRATEGIES))
    raise ConfigError(
        f"zero_dp_strategy={value!r} must be one of: {choices}",
        code="invalid_choice",
        keys=("zero_dp_strategy",),
        fix="parallelizer.zero_dp_strategy=3",
    )
