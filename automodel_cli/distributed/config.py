"""The `parallelizer` section: one node per strategy, with every option either acting or refused.

Torch-free at import: nodes hold plain values; `.build` makes torch's policy objects on the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.distributed.parallelizer_config import (
    ParallelizerConfig,
    check_choice,
    check_dtype,
    refuse_axes,
    refuse_idle_tp_options,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

CONTEXT_PARALLEL = ("all_gather", "ring")
EXPERT_DISPATCH = ("all_to_all", "deepep")
ZERO_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class MixedPrecision:
    """dtypes of FSDP2: of gathered parameters and compute, of gradient reduction, and of what the whole model returns.

    Null keeps the dtype of the parameters (`model.dtype`). The optimizer always steps on the parameters as stored.
    `output_dtype` acts on what the whole part returns, never on single layers. Null lets hidden states travel between
    pipeline stages as computed; log-probs are float32 in any case.
    """

    param_dtype: str | None = "bfloat16"
    reduce_dtype: str | None = "float32"
    output_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            check_dtype(field.name, getattr(self, field.name), f"parallelizer.mp_policy.{field.name}")

    def build(self) -> MixedPrecisionPolicy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=torch_dtype(self.param_dtype),
            reduce_dtype=torch_dtype(self.reduce_dtype),
            output_dtype=torch_dtype(self.output_dtype),
        )


@dataclass(frozen=True)
class CPUOffload:
    """Keep parameters, gradients and optimizer state in host memory; copy each layer to the device when it runs.

    Pinned memory makes the copies asynchronous. It is a CUDA notion, so it has no effect where the device is the CPU.
    """

    pin_memory: bool = True

    def build(self, device_type: str) -> CPUOffloadPolicy:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return CPUOffloadPolicy(pin_memory=self.pin_memory and device_type == "cuda")


@dataclass(frozen=True)
class FSDP2Config(ParallelizerConfig):
    """Fully sharded data parallelism, and hybrid sharding with `mesh.dp_replicate_size`.

    `sequence_parallel`, `tp_plan`, `enable_async_tensor_parallel`: tensor parallelism (need mesh.tp_size > 1).
    `patch_is_packed_sequence`: keep the library's own attention from searching every batch for packed rows, which waits
    for the device. For unpacked data only; `model.attention=packed` never searches.
    `mp_policy`: null = `MixedPrecision()`, bfloat16 compute with float32 reduction; or MixedPrecision, or torch's
    MixedPrecisionPolicy. `offload_policy`: null, CPUOffload, or torch's CPUOffloadPolicy.
    `autocast_dtype` wants an `mp_policy` that leaves parameters in float32: autocast casts nothing that is bfloat16.
    `defer_fsdp_grad_sync`: reduce gradients on the last microbatch only; false reduces on each (less memory, more
    communication, the same sum).
    `enable_fsdp2_prefetch`: gather `fsdp2_forward_prefetch_depth` / `fsdp2_backward_prefetch_depth` layers ahead.
    `context_parallel`: how attention reaches the keys of other ranks where mesh.cp_size > 1. "all_gather" holds all of
    them during one layer; "ring" passes them around, for rows so long that this is too much. The numbers are the same.
    `expert_dispatch`: how tokens reach experts on other ranks where mesh.ep_size > 1. "all_to_all" is torch's; "deepep"
    are DeepEP's kernels (CUDA, a package of their own), which send a token once to a rank with several of its experts.
    """

    sequence_parallel: bool = False
    tp_plan: Any = None
    patch_is_packed_sequence: bool = False
    mp_policy: Any = None
    offload_policy: Any = None
    defer_fsdp_grad_sync: bool = True
    enable_async_tensor_parallel: bool = False
    enable_fsdp2_prefetch: bool = False
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    context_parallel: str = CONTEXT_PARALLEL[0]
    expert_dispatch: str = EXPERT_DISPATCH[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_policy("mp_policy", self.mp_policy, MixedPrecision, "MixedPrecisionPolicy")
        _check_policy("offload_policy", self.offload_policy, CPUOffload, "CPUOffloadPolicy")
        check_choice("context_parallel", self.context_parallel, CONTEXT_PARALLEL, "parallelizer.context_parallel")
        check_choice("expert_dispatch", self.expert_dispatch, EXPERT_DISPATCH, "parallelizer.expert_dispatch")
        if self.enable_async_tensor_parallel and not self.enable_compile:
            raise ConfigError(
                "enable_async_tensor_parallel is something that the compiler does, but enable_compile=false",
                keys=("enable_async_tensor_parallel", "enable_compile"),
                fix="parallelizer.enable_compile=true",
            )
        self._check_prefetch()

    def _check_prefetch(self) -> None:
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            depth, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
                raise ConfigError(
                    f"{name}={depth!r} is not a number of layers",
                    keys=(name,),
                    fix=f"parallelizer.{name}={default}",
                )
            if depth != default and not self.enable_fsdp2_prefetch:
                raise ConfigError(
                    f"{name}={depth} does nothing while enable_fsdp2_prefetch=false",
                    keys=(name, "enable_fsdp2_prefetch"),
                    fix="parallelizer.enable_fsdp2_prefetch=true",
                )

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Refuse what this strategy cannot do on this mesh."""
        refuse_idle_tp_options(self, ("sequence_parallel", "enable_async_tensor_parallel", "tp_plan"), mesh)
        if (mesh.ep_size or 1) > 1 and self.enable_compile and self.activation_checkpointing:
            raise ConfigError(
                f"mesh.ep_size={mesh.ep_size}: how many tokens reach an expert is known only while the layer runs, so "
                "it cannot compile whole, as activation_checkpointing together with enable_compile needs",
                keys=("parallelizer.enable_compile", "parallelizer.activation_checkpointing", "mesh.ep_size"),
                fix="parallelizer.enable_compile=false, or parallelizer.activation_checkpointing=false",
            )
        for name, axis, default in (
            ("context_parallel", "cp_size", CONTEXT_PARALLEL[0]),
            ("expert_dispatch", "ep_size", EXPERT_DISPATCH[0]),
        ):
            if getattr(self, name) != default and (getattr(mesh, axis) or 1) == 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} does nothing while mesh.{axis}={getattr(mesh, axis) or 1}",
                    keys=(f"parallelizer.{name}", f"mesh.{axis}"),
                    fix=f"parallelizer.{name}={default}",
                )

    def build_mp_policy(self) -> MixedPrecisionPolicy:
        policy = MixedPrecision() if self.mp_policy is None else self.mp_policy
        return policy.build() if isinstance(policy, MixedPrecision) else policy

    def build_offload_policy(self, device_type: str) -> CPUOffloadPolicy | None:
        if self.offload_policy is None:
            return None
        pin_memory = self.offload_policy.pin_memory  # the one field that both kinds of policy have
        return CPUOffload(pin_memory).build(device_type)

    def compute_dtype(self) -> torch.dtype | None:
        return super().compute_dtype() or self.build_mp_policy().param_dtype

    def parameter_device(self, device: torch.device) -> torch.device:
        import torch

        return device if self.offload_policy is None else torch.device("cpu")


@dataclass(frozen=True)
class MegatronFSDPConfig(ParallelizerConfig):
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

    sequence_parallel: bool = False
    tp_plan: Any = None
    megatron_fsdp_unit_modules: list[str] | None = None
    zero_dp_strategy: int | str = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (refused, reason) in _MEGATRON_REFUSALS.items():
            if bool(getattr(self, name)) is refused:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is refused under megatron_fsdp: {reason}",
                    keys=(name,),
                    fix=f"parallelizer.{name}={str(not refused).lower()}",
                )
        strategy = zero_strategy(self.zero_dp_strategy)
        needs_overlap = {"overlap_grad_reduce": ZERO_STRATEGIES[2:], "overlap_param_gather": ZERO_STRATEGIES[3:]}
        for name, strategies in needs_overlap.items():
            if strategy in strategies and not getattr(self, name):
                raise ConfigError(
                    f"{name}=false cannot be honoured by zero_dp_strategy={self.zero_dp_strategy}, which communicates "
                    "inside forward and backward",
                    keys=(name, "zero_dp_strategy"),
                    fix=f"parallelizer.{name}=true",
                )
        if self.init_fsdp_with_meta_device and strategy == "no_shard":
            raise ConfigError(
                "init_fsdp_with_meta_device=true has nothing to shard with zero_dp_strategy=no_shard",
                keys=("init_fsdp_with_meta_device", "zero_dp_strategy"),
                fix="parallelizer.init_fsdp_with_meta_device=false",
            )
        if self.nccl_ub and self.backend != "nccl":
            raise ConfigError(
                f"nccl_ub=true registers buffers with NCCL, but backend={self.backend}",
                keys=("nccl_ub", "backend"),
                fix="parallelizer.nccl_ub=false",
            )

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Refuse what this strategy cannot do on this mesh."""
        refuse_axes("megatron_fsdp", mesh, {"pp_size": "pipeline", "ep_size": "expert"})
        if (mesh.dp_replicate_size or 1) > 1:
            raise ConfigError(
                f"parallelizer megatron_fsdp shards over one axis: dp_replicate_size={mesh.dp_replicate_size} is for "
                "hybrid sharding, which is fsdp2's",
                keys=("mesh.dp_replicate_size",),
                fix="mesh.dp_replicate_size=1, or parallelizer=fsdp2",
            )
        refuse_idle_tp_options(self, ("tp_plan",), mesh)

    def to_dict(self) -> dict[str, Any]:
        """Field -> value, without `tp_plan`: the documented node takes it at construction only."""
        return {name: value for name, value in super().to_dict().items() if name != "tp_plan"}


_MEGATRON_REFUSALS = {
    "sequence_parallel": (True, "the strategy has no sequence parallelism"),
    "activation_checkpointing": (True, "the package gathers parameters per unit and knows nothing of recomputing one"),
    "average_in_collective": (True, "gradients are sums here, and averaging them would weigh ranks, not tokens"),
    "check_for_nan_in_grad": (False, "every step is checked before the optimizer sees it, at no cost"),
    "keep_fp8_transpose_cache": (True, "it is for parameters stored in fp8, and none is"),
    "enable_compile": (True, "the package's hooks break every layer's graph"),
}


def zero_strategy(value: int | str) -> str:
    """0..3 or a name -> the name. Raises ConfigError for anything else, also for names of older documentation."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(ZERO_STRATEGIES):
        return ZERO_STRATEGIES[value]
    if value in ZERO_STRATEGIES:
        return str(value)
    choices = ", ".join(f"{number} = {name}" for number, name in enumerate(ZERO_STRATEGIES))
    raise ConfigError(
        f"zero_dp_strategy={value!r} is not one of {choices}",
        keys=("zero_dp_strategy",),
        fix="parallelizer.zero_dp_strategy=3",
    )


@dataclass(frozen=True)
class DDPConfig(ParallelizerConfig):
    """Whole copies on every rank, gradients summed in buckets while backward runs.

    `broadcast_buffers`: copy rank 0's buffers before each forward. `find_unused_parameters`: search the graph for
    parameters without gradient (slower). `static_graph`: promise that the same parameters are used every step
    (one microbatch per step only: torch's DDP cannot both record the graph and defer the reduction).
    `bucket_cap_mb`: bucket size in MiB, null = torch's choice. `gradient_as_bucket_view`: gradients live in the buckets
    (less memory).
    """

    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ConfigError(
                f"bucket_cap_mb={self.bucket_cap_mb!r} is not a size in MiB",
                keys=("bucket_cap_mb",),
                fix="parallelizer.bucket_cap_mb=25",
            )

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Refuse what this strategy cannot do on this mesh. (A pipeline sums gradients itself, without the wrapper.)"""
        refuse_axes("ddp", mesh, {"tp_size": "tensor", "cp_size": "context", "ep_size": "expert"})
        if (mesh.dp_replicate_size or 1) > 1:
            raise ConfigError(
                f"parallelizer ddp holds a whole copy on every rank: dp_replicate_size={mesh.dp_replicate_size} is for "
                "hybrid sharding, which is fsdp2's",
                keys=("mesh.dp_replicate_size",),
                fix="mesh.dp_replicate_size=1, or parallelizer=fsdp2",
            )


def _check_policy(name: str, value: object, node: type, torch_name: str) -> None:
    """Ours or torch's; torch's is recognised by name because this file must not import it."""
    torchs = any(c.__name__ == torch_name and c.__module__.startswith("torch.") for c in type(value).__mro__)
    if value is not None and not isinstance(value, node) and not torchs:
        raise ConfigError(
            f"{name} is {value!r}, which is neither a {node.__name__} nor torch's {torch_name}",
            keys=(name,),
            fix=f"parallelizer.{name}._target_={node.__module__}.{node.__name__}",
        )
