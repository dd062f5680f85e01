"""Config node of FSDP2 and its policies. Torch-free at import: `.build` creates torch's policy objects on the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import check_choice
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.compile_modes import AUTO
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import BuiltInStrategy, MemoryTraits
from automodel_cli.distributed.strategies.option_checks import (
    check_dtype,
    check_tp_plan,
    refuse_idle_tp_options,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

CONTEXT_PARALLEL = ("all_gather", "ring")
EXPERT_DISPATCH = ("all_to_all", "deepep")
EXPERTS = "experts"


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of FSDP2. null: the dtype of the parameters (`model.dtype`), which the optimizer updates.

    `output_dtype` applies to the output of the whole part, never to single layers. null sends hidden states between
    pipeline stages as computed. Log-probs are always float32.
    """

    param_dtype: str | None = "bfloat16"
    """Dtype of gathered parameters, in which GEMMs run."""
    reduce_dtype: str | None = "float32"
    """Dtype of gradient sums over ranks."""
    output_dtype: str | None = None
    """Dtype of the model's output. null: as computed."""

    def __post_init__(self) -> None:
        for f in fields(self):
            check_dtype(f.name, getattr(self, f.name), f"parallelizer.mp_policy.{f.name}")

    def build(self) -> MixedPrecisionPolicy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=torch_dtype(self.param_dtype),
            reduce_dtype=torch_dtype(self.reduce_dtype),
            output_dtype=torch_dtype(self.output_dtype),
        )


@dataclass(frozen=True)
class CPUOffload:
    """Keep parameters, gradients and optimizer state in host memory, and copy each layer to the device when it runs.

    `pin_memory` makes the copies asynchronous. It has no effect on a CPU.
    """

    pin_memory: bool = True
    """Pin host memory, so that copies are asynchronous."""

    def build(self, device_type: str) -> CPUOffloadPolicy:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return CPUOffloadPolicy(pin_memory=self.pin_memory and device_type == "cuda")


class TorchMixedPrecision(Protocol):
    """torch's MixedPrecisionPolicy, which this file must not import."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


class TorchOffload(Protocol):
    """torch's CPUOffloadPolicy."""

    pin_memory: bool


@dataclass(frozen=True)
class FSDP2Config(BuiltInStrategy):
    """Fully sharded data parallelism, and hybrid sharding with `mesh.dp_replicate_size`.

    Notes on single options:

    - `sequence_parallel`, `tp_plan` and `enable_async_tensor_parallel` need mesh.tp_size > 1.
    - `patch_is_packed_sequence` is for unpacked data only. `model.attn_implementation=packed` never searches batches.
    - `mp_policy` is null, MixedPrecision, or torch's MixedPrecisionPolicy. `offload_policy` is null, CPUOffload, or
      torch's CPUOffloadPolicy.
    - `autocast_dtype` needs an `mp_policy` that keeps parameters in float32, because autocast casts float32 only.
    - `defer_fsdp_grad_sync=false` gives the same sums. They are stored in `model.dtype` between microbatches. "experts"
      defers the gradients of distributed experts only. Use it if several ranks share each expert (more ranks than
      mesh.ep_size): these sums cross nodes, and are most of the communication. An expert on one rank has none.
    - `context_parallel`: both values give the same results. "ring" is for sequences whose keys do not fit into memory.
    - `expert_dispatch=deepep` needs CUDA and the package deep_ep. It sends a token once to a rank with several of its
      experts.
    - `keep_cast_experts=true` gathers and casts experts once per step. false does so in forward and backward of each
      microbatch, and keeps the experts of three layers in memory instead of all. "auto" keeps them if
      `activation_checkpointing: auto` leaves enough memory. Under a pipeline they are always kept.
    """

    supports: ClassVar[frozenset[str]] = frozenset(
        {"pp", "tp", "cp", "ep", "hsdp", "nf4", "fp8", "qat", "sampler", "mtp"}
    )

    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence."""
    tp_plan: Any = field(default=None, metadata=trust.imports())
    """Import path of a tensor-parallel plan, or the plan itself by module name. null: the plan of the model."""
    patch_is_packed_sequence: bool = False
    """Disable transformers' packed-sequence detection, which synchronizes with the device."""
    mp_policy: MixedPrecision | TorchMixedPrecision | None = None
    """Dtypes of compute and gradient sums. null: bfloat16 compute with float32 sums."""
    offload_policy: CPUOffload | TorchOffload | None = None
    """Keep parameters and optimizer states on the CPU between uses. null: on the device."""
    defer_fsdp_grad_sync: bool | str = True
    """Reduce gradients on the last microbatch only. false: on each one, with less memory and more communication.
    `experts`: those of distributed experts on the last one only, the others on each one."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with GEMMs."""
    enable_fsdp2_prefetch: bool = False
    """Prefetch the parameters of the next layers."""
    fsdp2_backward_prefetch_depth: int = 2
    """Number of layers to prefetch in the backward pass."""
    fsdp2_forward_prefetch_depth: int = 1
    """Number of layers to prefetch in the forward pass."""
    context_parallel: str = CONTEXT_PARALLEL[0]
    """Context-parallel attention: `all_gather` gathers the keys of all ranks for one layer, `ring` passes them
    around."""
    expert_dispatch: str = EXPERT_DISPATCH[0]
    """Token dispatcher: torch's `all_to_all`, or the kernels of `deepep` (CUDA)."""
    keep_cast_experts: bool | str = AUTO
    """Gather and cast experts once per step (true) or per microbatch (false). `auto`: once if memory allows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_policy("mp_policy", self.mp_policy, MixedPrecision, "MixedPrecisionPolicy")
        _check_policy("offload_policy", self.offload_policy, CPUOffload, "CPUOffloadPolicy")
        check_tp_plan(self.tp_plan)
        self._check_autocast()
        for name, choices in (
            ("context_parallel", CONTEXT_PARALLEL),
            ("expert_dispatch", EXPERT_DISPATCH),
            ("keep_cast_experts", (AUTO, True, False)),
            ("defer_fsdp_grad_sync", (True, False, EXPERTS)),
        ):
            check_choice(name, getattr(self, name), choices, fix=f"parallelizer.{name}={choices[0]}")
        if self.enable_async_tensor_parallel and self.enable_compile is not True:
            raise ConfigError(
                "enable_async_tensor_parallel=true needs compiled layers, but "
                f"enable_compile={str(self.enable_compile).lower()}",
                code="requires_setting",
                keys=("enable_async_tensor_parallel", "enable_compile"),
                fix="parallelizer.enable_compile=true",
            )
        self._check_prefetch()

    def _check_autocast(self) -> None:
        """Raise ConfigError if autocast has no effect.

        It casts float32 only, and mp_policy=null computes in bfloat16.
        """
        policy = MixedPrecision() if self.mp_policy is None else self.mp_policy
        dtype = str(policy.param_dtype or "float32").removeprefix("torch.")
        if self.autocast_dtype is None or dtype == "float32":
            return
        raise ConfigError(
            f"autocast_dtype={self.autocast_dtype} has no effect because mp_policy gathers parameters in {dtype}, and "
            "autocast casts float32 only",
            code="no_effect",
            keys=("autocast_dtype", "mp_policy"),
            fix=f"parallelizer.autocast_dtype=null parallelizer.mp_policy.param_dtype={self.autocast_dtype}",
        )

    def _check_prefetch(self) -> None:
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            depth, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
                raise ConfigError(
                    f"{name}={depth!r} must be a number of layers, at least 0",
                    code="out_of_range",
                    keys=(name,),
                    fix=f"parallelizer.{name}={default}",
                )
            if depth != default and not self.enable_fsdp2_prefetch:
                raise ConfigError(
                    f"{name}={depth} has no effect with enable_fsdp2_prefetch=false",
                    code="no_effect",
                    keys=(name, "enable_fsdp2_prefetch"),
                    fix="parallelizer.enable_fsdp2_prefetch=true",
                )

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Raise ConfigError if FSDP2 or an option does not support this mesh."""
        super().check_mesh(mesh)
        refuse_idle_tp_options(self, ("sequence_parallel", "enable_async_tensor_parallel", "tp_plan"), mesh)
        if (mesh.ep_size or 1) > 1 and self.enable_compile is True and self.activation_checkpointing == "selective":
            raise ConfigError(
                "enable_compile with activation_checkpointing=selective is not supported with "
                f"mesh.ep_size={mesh.ep_size}, because the number of tokens per expert depends on the data and breaks "
                "the graph of a layer",
                code="unsupported_combination",
                keys=("parallelizer.enable_compile", "parallelizer.activation_checkpointing", "mesh.ep_size"),
                fix="parallelizer.activation_checkpointing=full, or parallelizer.enable_compile=false",
            )
        if self.defer_fsdp_grad_sync == EXPERTS and (mesh.ep_size or 1) == 1:
            raise ConfigError(
                f"defer_fsdp_grad_sync={EXPERTS} has no effect because no experts are distributed "
                f"(mesh.ep_size={mesh.ep_size or 1})",
                code="no_effect",
                keys=("parallelizer.defer_fsdp_grad_sync", "mesh.ep_size"),
                fix="parallelizer.defer_fsdp_grad_sync=false",
            )
        for name, axis, default in (
            ("context_parallel", "cp_size", CONTEXT_PARALLEL[0]),
            ("expert_dispatch", "ep_size", EXPERT_DISPATCH[0]),
            ("keep_cast_experts", "ep_size", AUTO),
        ):
            if getattr(self, name) != default and (getattr(mesh, axis) or 1) == 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect with mesh.{axis}={getattr(mesh, axis) or 1}",
                    code="no_effect",
                    keys=(f"parallelizer.{name}", f"mesh.{axis}"),
                    fix=f"parallelizer.{name}={default}",
                )

    def axis_options(self) -> AxisOptions:
        return AxisOptions(
            self.tp_plan,
            self.sequence_parallel,
            self.enable_async_tensor_parallel,
            self.context_parallel == "ring",
            self.expert_dispatch,
        )

    def storage(self) -> MemoryTraits:
        policy = self.build_mp_policy()
        return MemoryTraits(
            frozenset({"parameters", "gradients", "optimizer"}),
            compute_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype or policy.param_dtype,
            defers=self.defer_fsdp_grad_sync is True,
            defers_experts=self.defer_fsdp_grad_sync == EXPERTS,
            offloaded=self.offload_policy is not None,
            keeps_experts=self.keep_cast_experts is True,
        )

    def keeping_experts(self) -> Self | None:
        return replace(self, keep_cast_experts=True) if self.keep_cast_experts == AUTO else None

    def exact(self, axes: Sequence[str], *, precision: bool = False, compiled: bool = False) -> Self:
        plain = replace(
            super().exact(axes, precision=precision, compiled=compiled),
            mp_policy=self.mp_policy if precision else MixedPrecision(param_dtype=None, reduce_dtype=None),
            enable_async_tensor_parallel=False,
        )
        if "tp" not in axes:
            plain = replace(plain, sequence_parallel=False, tp_plan=None)
        if "ep" not in axes:
            every = False if plain.defer_fsdp_grad_sync == EXPERTS else plain.defer_fsdp_grad_sync
            plain = replace(plain, keep_cast_experts=AUTO, defer_fsdp_grad_sync=every)
        return plain if "cp" in axes else replace(plain, context_parallel=CONTEXT_PARALLEL[0])

    @property
    def reduces_every_microbatch(self) -> bool:
        return self.defer_fsdp_grad_sync is not True

    @property
    def adds_in_products(self) -> bool:
        """Whether weight gradients accumulate in GEMMs.

        Not with compiled layers, whose graphs cannot contain an outside sum, and not with autocast, which casts
        weights.
        """
        return self.enable_compile is not True and self.autocast_dtype is None

    @property
    def assumes_unpacked(self) -> bool:
        return self.patch_is_packed_sequence

    def build_mp_policy(self) -> MixedPrecisionPolicy:
        policy = MixedPrecision() if self.mp_policy is None else self.mp_policy
        return policy.build() if isinstance(policy, MixedPrecision) else cast("MixedPrecisionPolicy", policy)

    def build_offload_policy(self, device_type: str) -> CPUOffloadPolicy | None:
        if self.offload_policy is None:
            return None
        pin_memory = self.offload_policy.pin_memory  # The only field that both kinds of policy have.
        return CPUOffload(pin_memory).build(device_type)

    def compute_dtype(self) -> torch.dtype | None:
        return super().compute_dtype() or self.build_mp_policy().param_dtype

    def parameter_device(self, device: torch.device) -> torch.device:
        import torch

        return device if self.offload_policy is None else torch.device("cpu")


def _check_policy(name: str, value: object, node: type, torch_name: str) -> None:
    """Raise ConfigError unless `value` is a node of this package or torch's class, which is recognized by its name."""
    torchs = any(c.__name__ == torch_name and c.__module__.startswith("torch.") for c in type(value).__mro__)
    if value is not None and not isinstance(value, node) and not torchs:
        raise ConfigError(
            f"{name}={value!r} must be a {node.__name__} or torch's {torch_name}",
            code="wrong_type",
            keys=(name,),
            fix=f"parallelizer.{name}._target_={node.__module__}.{node.__name__}",
        )
