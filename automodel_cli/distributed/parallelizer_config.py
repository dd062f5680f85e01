"""What every parallelizer node has, and the checks that they share. Torch-free at import, like all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.layout import MeshConfig

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("nccl", "gloo")
DEFAULT_COMPILE_BACKEND = "inductor"


@dataclass(frozen=True)
class ParallelizerConfig:
    """What every strategy has.

    `activation_checkpointing`: false | true = "full" | "selective" (keep matrix products and attention) | n = every
    n-th layer.
    `autocast_dtype`: run forward under autocast.
    `backend`: process-group backend; "nccl" on a machine without CUDA means gloo on the CPU.
    `enable_compile`: torch.compile each layer in place with `compile_backend` ("inductor"; "aot_eager" compiles in a
    second and is what the tests use). Together with activation checkpointing a layer must compile whole: on a CUDA
    device it should; on a CPU, packed attention cannot, and torch says so at the first forward.
    """

    activation_checkpointing: bool | int | str = False
    autocast_dtype: str | None = None
    backend: str = "nccl"
    enable_compile: bool = False
    compile_backend: str = DEFAULT_COMPILE_BACKEND

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS, "parallelizer.backend")
        check_dtype("autocast_dtype", self.autocast_dtype, "parallelizer.autocast_dtype")
        value = self.activation_checkpointing
        every_nth = isinstance(value, int) and value >= 1
        if not (isinstance(value, bool) or every_nth or value in ("full", "selective")):
            choices = "false, true, full, selective, or n >= 1 (every n-th layer)"
            raise ConfigError(
                f"activation_checkpointing={value!r} is not one of {choices}",
                keys=("activation_checkpointing",),
                fix="parallelizer.activation_checkpointing=full",
            )
        if self.compile_backend != DEFAULT_COMPILE_BACKEND and not self.enable_compile:
            raise ConfigError(
                f"compile_backend={self.compile_backend} does nothing while enable_compile=false",
                keys=("compile_backend", "enable_compile"),
                fix="parallelizer.enable_compile=true",
            )

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Refuse what this strategy cannot do on this mesh, by ConfigError with keys relative to the recipe."""
        raise NotImplementedError

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
            f"{name}={value!r} is not one of {', '.join(choices)}", keys=(name,), fix=f"{path}={choices[0]}"
        )


def refuse_axes(strategy: str, mesh: MeshConfig, axes: dict[str, str]) -> None:
    for name, kind in axes.items():
        size = getattr(mesh, name) or 1
        if size > 1:
            raise ConfigError(
                f"parallelizer {strategy} has no {kind} parallelism: {name}={size} must be 1",
                keys=(f"mesh.{name}",),
                fix=f"mesh.{name}=1",
            )


def refuse_idle_tp_options(config: ParallelizerConfig, names: Sequence[str], mesh: MeshConfig) -> None:
    """Options of tensor parallelism on a mesh that has none."""
    for name in names:
        if getattr(config, name) and (mesh.tp_size or 1) == 1:
            off = "null" if name == "tp_plan" else "false"
            raise ConfigError(
                f"{name} needs tensor parallelism, but mesh.tp_size={mesh.tp_size or 1}",
                keys=(f"parallelizer.{name}", "mesh.tp_size"),
                fix=f"parallelizer.{name}={off}",
            )
