"""What a strategy of data parallelism is: the node of the `parallelizer` section and what it is asked.

A strategy of your own is a frozen dataclass that inherits from `ParallelizerConfig` and implements `shard`; see
examples/own_parallelizer.py. The built-in strategies only hold options: `parallelizer.py` maps their types to the
functions that shard. Torch-free at import, like all nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.compile_modes import AUTO, FUSED_OPS
from automodel_cli.distributed.mesh_config import MeshConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from automodel_cli.distributed.mesh import Mesh

DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("nccl", "gloo")
DEFAULT_COMPILE_BACKEND = "inductor"


@dataclass(frozen=True)
class MemoryTraits:
    """What a rank keeps, for the planner.

    `shards`: which of "parameters", "gradients" and "optimizer" are cut over the data-parallel and context-parallel
    ranks; the others are whole copies. `compute_dtype` of gathered parameters, `reduce_dtype` of gradients: null is the
    dtype as stored. `defers`: gradients add up unsharded until the last microbatch. `gradient_copies` of whole
    gradients. `offloaded`: what is sharded lives in host memory. `keeps_experts`: those of all layers stay gathered.
    """

    shards: frozenset[str] = frozenset()
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    defers: bool = True
    gradient_copies: int = 1
    offloaded: bool = False
    keeps_experts: bool = False


class Strategy(Protocol):
    """What recipes ask of the `parallelizer` node; `ParallelizerConfig` answers all but `shard`."""

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
    """What every strategy has.

    `supports` names what the strategy can be combined with: the axes "pp", "tp", "cp", "ep", hybrid sharding "hsdp",
    4-bit layers "nf4", layers for multi-token prediction "mtp", and "sampler", drawing tokens from the parts as they
    are trained. All else is refused at check.

    `activation_checkpointing`: false | true = "full" | "selective" (keep matrix products and attention) | "minimal" |
    n = every n-th layer | "auto". What other ranks sent to experts here is kept by all but "minimal", which has it sent
    again. "auto" takes the first of none, "selective", "full" and "minimal" that has room by the estimate of
    `automodel plan` on the run's GPUs, and says so in the header; on a CPU, none.
    `autocast_dtype`: run forward under autocast.
    `backend`: process-group backend; "nccl" on a machine without CUDA means gloo on the CPU.
    `enable_compile`: "fused_ops" (norms, gates of MLPs and experts, rotary positions and the sum over experts as one
    kernel
    each) | "auto" = "fused_ops" on a CUDA device, of what compiles there and computes the same in a small example, and
    nothing on a CPU | true (each layer in place, as whole as can be) | false. By torch.compile with `compile_backend`
    ("inductor"; "aot_eager" compiles in a second and is what the tests use). true with
    activation_checkpointing=selective needs whole layers: on a CUDA device they should compile so; on a CPU, packed
    attention cannot.
    """

    supports: ClassVar[frozenset[str]] = frozenset()

    activation_checkpointing: bool | int | str = False
    """Recompute activations in the backward pass: false, `full` (true), `selective` (saves GEMM results and
    attention), `minimal`, every n-th layer (n), or `auto` (by available memory)."""
    autocast_dtype: str | None = None
    """Run the forward pass under autocast in this dtype. null: no autocast."""
    backend: str = "nccl"
    """Process-group backend. Without CUDA `nccl` means gloo on the CPU."""
    enable_compile: bool | str = AUTO
    """Scope of torch.compile: `fused_ops` (norms, gates, rotary embeddings), whole layers (true) or nothing (false).
    `auto` is `fused_ops` on CUDA."""
    compile_backend: str = DEFAULT_COMPILE_BACKEND
    """Backend of torch.compile."""

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS, "parallelizer.backend")
        check_dtype("autocast_dtype", self.autocast_dtype, "parallelizer.autocast_dtype")
        value = self.activation_checkpointing
        every_nth = isinstance(value, int) and value >= 1
        if not (isinstance(value, bool) or every_nth or value in ("full", "selective", "minimal", AUTO)):
            choices = "false, true, full, selective, minimal, auto, or n >= 1 (every n-th layer)"
            raise ConfigError(
                f"activation_checkpointing={value!r} must be one of: {choices}",
                code="invalid_choice",
                keys=("activation_checkpointing",),
                fix="parallelizer.activation_checkpointing=full",
            )
        if not isinstance(self.enable_compile, bool) and self.enable_compile not in (FUSED_OPS, AUTO):
            raise ConfigError(
                f"enable_compile={self.enable_compile!r} must be one of: auto, fused_ops, true, false",
                code="invalid_choice",
                keys=("enable_compile",),
                fix="parallelizer.enable_compile=auto",
            )
        if self.compile_backend != DEFAULT_COMPILE_BACKEND and not self.enable_compile:
            raise ConfigError(
                f"compile_backend={self.compile_backend} has no effect with enable_compile=false",
                code="no_effect",
                keys=("compile_backend", "enable_compile"),
                fix="parallelizer.enable_compile=true",
            )

    @property
    def name(self) -> str:
        """What messages call the strategy."""
        return type(self).__name__.removesuffix("Config").lower()

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Refuse what this strategy cannot do on this mesh, by ConfigError with keys relative to the recipe."""
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
        """Raise ConfigError, with the command that helps, where the strategy cannot run on this machine."""

    def axis_options(self) -> AxisOptions:
        """For the axes that are applied before the strategy."""
        return AxisOptions()

    @abstractmethod
    def shard(self, part: nn.Module, mesh: Mesh) -> nn.Module:
        """Apply data parallelism, the last step of `parallelize`.

        Register a `sharded.Sharded` where a step must know of it. Gradients must become sums over `mesh.dp_cp`. Returns
        the module that runs. Collective."""
        raise NotImplementedError

    def keeping_experts(self) -> Self | None:
        """The same with experts that stay gathered for a step, where it leaves that to the machine; else None."""
        return None

    def storage(self) -> MemoryTraits:
        """What a rank keeps, for `automodel plan`."""
        return MemoryTraits()

    def exact(self, axes: Sequence[str], *, precision: bool = False, compiled: bool = False) -> Self:
        """The same options in float32, uncompiled, without what needs a CUDA device or an axis that is not in `axes`:
        what `automodel verify` compares with one process. `precision` and `compiled` keep those of the options."""
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
        """Whether gradients are reduced on each microbatch instead of once per step."""
        return False

    @property
    def assumes_unpacked(self) -> bool:
        """Whether every row is taken for one document, so that the library does not search for packed ones."""
        return False

    def parameter_device(self, device: torch.device) -> torch.device:
        """Where parameters live between steps, for whoever fills them."""
        return device

    def compute_dtype(self) -> torch.dtype | None:
        """What matrix products run in; None: the dtype of the parameters."""
        dtype: torch.dtype | None = torch_dtype(self.autocast_dtype)
        return dtype

    def to_dict(self) -> dict[str, Any]:
        """Field -> value; policies stay objects."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class BuiltInStrategy(ParallelizerConfig):
    """A strategy of this package: options only. `parallelizer.py` maps its type to the function that shards."""

    def shard(self, part: nn.Module, mesh: Mesh) -> nn.Module:
        """Not called: see `parallelizer.SHARD`."""
        raise NotImplementedError(f"{type(self).__name__} has no function in parallelizer.SHARD")


def torch_dtype(name: str | None) -> Any:
    """ "bfloat16" -> torch.bfloat16; None stays None."""
    import torch

    return None if name is None else getattr(torch, name)


def check_dtype(name: str, value: object, path: str) -> None:
    if value is not None:
        check_choice(name, value, DTYPES, path)


def check_choice(name: str, value: object, choices: Sequence[str], path: str) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} must be one of: {', '.join(choices)}",
            code="invalid_choice",
            keys=(name,),
            fix=f"{path}={choices[0]}",
        )


def refuse_axes(strategy: str, mesh: MeshConfig, axes: dict[str, str]) -> None:
    for name, kind in axes.items():
        size = getattr(mesh, name) or 1
        if size > 1:
            raise ConfigError(
                f"mesh.{name}={size} is not supported because parallelizer={strategy} has no {kind} parallelism",
                code="unsupported_combination",
                keys=(f"mesh.{name}",),
                fix=f"mesh.{name}=1",
            )


def check_tp_plan(plan: Any) -> None:
    """Refuse what is no tensor-parallel plan: an import path, a function, or styles by module name (a name or an object
    each)."""
    fix = "parallelizer.tp_plan=null"
    if plan is None or callable(plan) or (isinstance(plan, str) and plan):
        return
    if not isinstance(plan, Mapping) or not plan:
        message = f"tp_plan={plan!r} must be an import path or a mapping of module names to styles"
        raise ConfigError(message, code="wrong_type", keys=("tp_plan",), fix=fix)
    for name, style in plan.items():
        if style is None or isinstance(style, (bool, int, float, list, dict)):
            raise ConfigError(
                f"tp_plan[{name!r}]={style!r} must be the name of a style, for example colwise",
                code="wrong_type",
                keys=("tp_plan",),
                fix=fix,
            )


def refuse_idle_tp_options(config: ParallelizerConfig, names: Sequence[str], mesh: MeshConfig) -> None:
    """Options of tensor parallelism on a mesh that has none."""
    for name in names:
        if getattr(config, name) and (mesh.tp_size or 1) == 1:
            off = "null" if name == "tp_plan" else "false"
            raise ConfigError(
                f"{name} needs tensor parallelism, but mesh.tp_size={mesh.tp_size or 1}",
                code="requires_setting",
                keys=(f"parallelizer.{name}", "mesh.tp_size"),
                fix=f"parallelizer.{name}={off}",
            )
