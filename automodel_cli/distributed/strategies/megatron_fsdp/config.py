"""Config node of Megatron-FSDP. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import trust
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import BuiltInStrategy, MemoryTraits
from automodel_cli.distributed.strategies.option_checks import check_tp_plan, refuse_idle_tp_options

ZERO_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class MegatronFSDPConfig(BuiltInStrategy):
    """Fully sharded data parallelism by NVIDIA's `megatron-fsdp` (extra `megatron`), with tensor and context
    parallelism.

    Computes in the dtype of the parameters (`model.dtype`). Notes on single options:

    - `zero_dp_strategy`: 0 "no_shard", 1 "optim", 2 "optim_grads", 3 "optim_grads_params".
    - `init_fsdp_with_meta_device` needs a strategy that shards.
    - `grad_reduce_in_fp32` and `preserve_fp32_weights` matter if `model.dtype` is not float32.
    - `overlap_grad_reduce` is required with strategies 2 and 3, `overlap_param_gather` with strategy 3.
    - `calculate_per_token_loss` has no effect: gradients are sums, and the loss is divided by the tokens of the whole
      step.
    - Rejected values: `sequence_parallel`, `activation_checkpointing`, `average_in_collective`,
      `keep_fp8_transpose_cache` and whole-layer compilation, and `check_for_nan_in_grad=false`.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"tp", "cp"})

    sequence_parallel: bool = False
    """Not supported with this parallelizer. Only false is accepted."""
    tp_plan: Any = field(default=None, metadata=trust.imports())
    """Tensor-parallel plan, as for FSDP2."""
    megatron_fsdp_unit_modules: list[str] | None = field(default=None, metadata=trust.imports())
    """Import paths of the classes that form one FSDP unit. null: the model's decoder layers."""
    zero_dp_strategy: int | str = 3
    """ZeRO stage: nothing is sharded (0), optimizer states (1), gradients too (2), parameters too (3)."""
    init_fsdp_with_meta_device: bool = False
    """Shard first, then load the shards, so that no rank holds the whole model."""
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
    """Not supported, because gradients are summed. Only false is accepted."""
    disable_bucketing: bool = False
    """Use one bucket for parameters outside the units."""
    calculate_per_token_loss: bool = False
    """No effect: gradients are always sums, divided once by the tokens of the step."""
    keep_fp8_transpose_cache: bool = False
    """Not supported, because parameters are never float8. Only false is accepted."""
    nccl_ub: bool = False
    """Allocate communication buffers in memory registered with NCCL (CUDA)."""
    fsdp_double_buffer: bool = False
    """Use two persistent communication buffers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (refused, reason) in _MEGATRON_REFUSALS.items():
            value = getattr(self, name)
            # Fused ops run inside the modules that have hooks.
            is_on = value is True if name == "enable_compile" else bool(value)
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
        """Raise ConfigError if the strategy does not support this mesh."""
        super().check_mesh(mesh)
        # gloo always selects the CPU. With nccl, a login node without a GPU may check the config.
        if self.backend == "gloo":
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

    def to_dict(self) -> dict[str, object]:
        """Return a dict of all fields except `tp_plan`, which the documented node accepts at construction only."""
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
    """Return the name of a strategy 0..3.

    Raises ConfigError for other values, also for names of older documentation.
    """
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
