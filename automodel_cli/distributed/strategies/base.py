"""Interface of data-parallel strategies, and the base class of their config nodes (section `parallelizer`).

A custom strategy is a frozen dataclass that inherits from `ParallelizerConfig` and implements `shard`. See
examples/own_parallelizer.py. Built-in nodes contain options only: `parallelizer.py` maps their types to functions.
Torch-free at import, like all nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice
from automodel_cli.distributed.activation_checkpointing.mode import is_some
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.compile_modes import AUTO, FUSED_OPS
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.option_checks import check_dtype, refuse_axes, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    from automodel_cli.distributed.mesh import Mesh

BACKENDS = ("nccl", "gloo")
DEFAULT_COMPILE_BACKEND = "inductor"


@dataclass(frozen=True)
class MemoryTraits:
    """Memory that a rank needs, for the planner.

    Attributes:
        shards: which of "parameters", "gradients" and "optimizer" are sharded over the data-parallel and
            context-parallel ranks. The others are replicated.
        compute_dtype: dtype of gathered parameters. None: as stored.
        reduce_dtype: dtype of gradients in reductions. None: as stored.
        defers: gradients accumulate unsharded until the last microbatch.
        defers_experts: those of distributed experts do, if not all.
        gradient_copies: copies of unsharded gradients.
        offloaded: shards are in host memory.
        keeps_experts: gathered experts of all layers stay in memory.
    """

    shards: frozenset[str] = frozenset()
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    defers: bool = True
    defers_experts: bool = False
    gradient_copies: int = 1
    offloaded: bool = False
    keeps_experts: bool = False


class Strategy(Protocol):
    """Interface that recipes use. `ParallelizerConfig` implements everything except `shard`."""

    supports: ClassVar[frozenset[str]]

    @property
    def name(self) -> str: ...
    @property
    def activation_checkpointing(self) -> bool | int | str: ...
    @property
    def autocast_dtype(self) -> str | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def enable_compile(self) -> bool | str: ...
    @property
    def compile_backend(self) -> str: ...

    def check_mesh(self, mesh: MeshConfig) -> None: ...
    def check_installed(self) -> None: ...
    def axis_options(self) -> AxisOptions: ...
    def shard(self, part: nn.Module, mesh: Mesh) -> nn.Module: ...
    def storage(self) -> MemoryTraits: ...
    def parameter_device(self, device: torch.device) -> torch.device: ...
    def compute_dtype(self) -> torch.dtype | None: ...
    def exact(self, axes: Sequence[str], *, precision: bool = False, compiled: bool = False) -> Strategy: ...
    @property
    def reduces_every_microbatch(self) -> bool: ...
    @property
    def assumes_unpacked(self) -> bool: ...


AXIS_SIZES = {
    "pp": ("pp_size", "pipeline"),
    "tp": ("tp_size", "tensor"),
    "cp": ("cp_size", "context"),
    "ep": ("ep_size", "expert"),
}


@dataclass(frozen=True)
class ParallelizerConfig:
    """Base class of all strategies.

    `supports` lists the features that can be combined with the strategy: the axes "pp", "tp", "cp" and "ep", hybrid
    sharding "hsdp", 4-bit layers "nf4", float8 layers "fp8", fake quantization "qat", multi-token-prediction layers
    "mtp", and "sampler" (generation with the trained parts). Other combinations are rejected by `check_mesh`.

    `activation_checkpointing`: false, "full" (or true), "selective" (save GEMMs and attention), "minimal",
    "full:k/n" (k of every n layers of a stage), n (every n-th layer) or "auto". All modes except "minimal" save
    received tokens of experts, and "minimal" sends them again. "auto" selects the cheapest of none, "selective", as few
    layers as necessary ("full:k/n"), "full" and "minimal" that fits the estimate of `automodel plan` on the GPUs of the
    run. The startup summary shows it. On a CPU, "auto" selects none.

    `enable_compile`: "fused_ops" compiles norms, gates of MLPs and experts, rotary embeddings and the sum over experts
    into one kernel each. "auto" is "fused_ops" on CUDA, limited to regions that compile and pass a small test, and
    nothing on a CPU. true compiles whole layers in place. With activation_checkpointing=selective, layers must compile
    without graph breaks. On a CPU, packed attention does not.

    `compile_backend`: "inductor", or for example "aot_eager", which compiles in a second and is used by tests.
    """

    supports: ClassVar[frozenset[str]] = frozenset()

    activation_checkpointing: bool | int | str = False
    """Recompute activations in the backward pass: false, `full` (true), `selective` (saves GEMM results and
    attention), `minimal`, `full:k/n` (k of n layers), every n-th layer (n), or `auto` (by available memory)."""
    autocast_dtype: str | None = None
    """Run the forward pass under autocast in this dtype. null: no autocast."""
    backend: str = "nccl"
    """Process-group backend. Without CUDA, `nccl` selects gloo on the CPU."""
    enable_compile: bool | str = AUTO
    """Scope of torch.compile: `fused_ops` (norms, gates, rotary embeddings), whole layers (true) or nothing (false).
    `auto` is `fused_ops` on CUDA."""
    compile_backend: str = DEFAULT_COMPILE_BACKEND
    """Backend of torch.compile."""

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS, fix=f"parallelizer.backend={BACKENDS[0]}")
        check_dtype("autocast_dtype", self.autocast_dtype, "parallelizer.autocast_dtype")
        value = self.activation_checkpointing
        every_nth = isinstance(value, int) and value >= 1
        named = value in ("full", "selective", "minimal", AUTO) or is_some(value)
        if not (isinstance(value, bool) or every_nth or named):
            raise ConfigError(
                f"activation_checkpointing={value!r} must be one of: false, true, full, selective, minimal, auto, "
                "full:k/n (k of n layers), or n >= 1 (every n-th layer)",
                code="invalid_choice",
                keys=("activation_checkpointing",),
                fix="parallelizer.activation_checkpointing=full",
            )
        choices = (AUTO, FUSED_OPS, True, False)
        check_choice("enable_compile", self.enable_compile, choices, fix="parallelizer.enable_compile=auto")
        if self.compile_backend != DEFAULT_COMPILE_BACKEND and not self.enable_compile:
            raise ConfigError(
                f"compile_backend={self.compile_backend} has no effect with enable_compile=false",
                code="no_effect",
                keys=("compile_backend", "enable_compile"),
                fix="parallelizer.enable_compile=true",
            )

    @property
    def name(self) -> str:
        """Name of the strategy in messages."""
        return type(self).__name__.removesuffix("Config").lower()

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Raise ConfigError if the strategy does not support this mesh.

        Keys of the error are relative to the recipe.
        """
        axes = {size: kind for axis, (size, kind) in AXIS_SIZES.items() if axis not in self.supports}
        refuse_axes(self.name, mesh, axes)
        if (mesh.dp_replicate_size or 1) > 1 and "hsdp" not in self.supports:
            raise ConfigError(
                f"mesh.dp_replicate_size={mesh.dp_replicate_size} is not supported with parallelizer={self.name}: only "
                "fsdp2 has hybrid sharding",
                code="unsupported_combination",
                keys=("mesh.dp_replicate_size",),
                fix="mesh.dp_replicate_size=1, or parallelizer=fsdp2",
            )

    def check_installed(self) -> None:
        """Raise ConfigError if the strategy cannot run on this machine."""

    def axis_options(self) -> AxisOptions:
        """Return the options of axes that are applied before the strategy."""
        return AxisOptions()

    @abstractmethod
    def shard(self, part: nn.Module, mesh: Mesh) -> nn.Module:
        """Apply data parallelism, the last step of `parallelize`.

        Register a `sharded_module.Sharded` if the training step must notify the strategy. Gradients must be sums over
        `mesh.dp_cp`. Returns the module to run. Collective.
        """
        raise NotImplementedError

    def keeping_experts(self) -> Self | None:
        """Return the same strategy with experts that stay gathered during a step, or None if that is not automatic."""
        return None

    def storage(self) -> MemoryTraits:
        """Return the memory that a rank needs, for `automodel plan`."""
        return MemoryTraits()

    def exact(self, axes: Sequence[str], *, precision: bool = False, compiled: bool = False) -> Self:
        """Return the options in float32, uncompiled, and without features of CUDA or of axes outside `axes`.

        `automodel verify` compares this variant with one process.

        Args:
            precision: keep the precision options.
            compiled: keep the compile options.
        """
        recomputed = self.activation_checkpointing
        compiled = compiled and self.enable_compile in (True, FUSED_OPS)
        return replace(
            self,
            activation_checkpointing="full" if recomputed == AUTO else recomputed,
            autocast_dtype=self.autocast_dtype if precision else None,
            enable_compile=self.enable_compile if compiled or self.enable_compile == AUTO else False,
            compile_backend=self.compile_backend if compiled else DEFAULT_COMPILE_BACKEND,
            backend="gloo",
        )

    @property
    def reduces_every_microbatch(self) -> bool:
        """Gradients are reduced after each microbatch instead of once per step."""
        return False

    @property
    def assumes_unpacked(self) -> bool:
        """Every sequence is one document, so that transformers does not search for packed ones."""
        return False

    def parameter_device(self, device: torch.device) -> torch.device:
        """Return the device of parameters between steps."""
        return device

    def compute_dtype(self) -> torch.dtype | None:
        """Return the dtype of GEMMs. None: the dtype of the parameters."""
        return torch_dtype(self.autocast_dtype)

    def to_dict(self) -> dict[str, object]:
        """Return a dict of all fields. Policies stay objects."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class BuiltInStrategy(ParallelizerConfig):
    """A strategy of this package, with options only. `parallelizer.py` maps its type to the function that shards."""

    def shard(self, part: nn.Module, mesh: Mesh) -> nn.Module:
        """Not called. See `parallelizer.SHARD`."""
        raise NotImplementedError(f"{type(self).__name__} has no function in parallelizer.SHARD")
