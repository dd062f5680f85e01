"""Mesh axes of a pipeline, and checks of options that need no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range
from automodel_cli.distributed.mesh import Mesh

OUR_DP_AXES = ("dp_replicate", "dp_shard")  # Axes that "dp" means on the mesh of `distributed.mesh`.


@dataclass(frozen=True)
class Axes:
    """Axis names by role, validated against the meshes. Raises ConfigError, also for `mesh=None`."""

    mesh: DeviceMesh | None
    moe_mesh: DeviceMesh | None = None
    pp_axis_name: str = "pp"
    dp_axis_names: tuple[str, ...] = ("dp",)
    cp_axis_name: str | None = None
    tp_axis_name: str | None = None
    ep_axis_name: str | None = None
    ep_shard_axis_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> Axes:
        """Return the axes of a run's mesh."""
        return cls(mesh.root, cp_axis_name="cp" if mesh.layout.cp > 1 else None)

    def __post_init__(self) -> None:
        if self.mesh is None:
            raise ConfigError(
                "AutoPipeline needs world_mesh, a device mesh with the pipeline axis",
                code="missing_key",
                keys=("world_mesh",),
            )
        known = self.mesh.mesh_dim_names or ()
        expert = known if self.moe_mesh is None else self.moe_mesh.mesh_dim_names or ()
        for key, given, valid in (
            ("pp_axis_name", (self.pp_axis_name,), known),
            ("dp_axis_names", self._dp_axes(), known),
            ("cp_axis_name", (self.cp_axis_name,), known),
            ("tp_axis_name", (self.tp_axis_name,), known),
            ("ep_axis_name", (self.ep_axis_name,), expert),
            ("ep_shard_axis_names", self.ep_shard_axis_names or (), expert),
        ):
            for name in given:
                if name is not None and name not in valid:
                    raise ConfigError(
                        f"{key}={name!r} must be an axis of the mesh: {', '.join(valid)}",
                        code="unknown_name",
                        keys=(key,),
                    )

    def _dp_axes(self) -> tuple[str, ...]:
        """Return the data-parallel axes. "dp" means none on a mesh that has the pipeline axis only."""
        assert self.mesh is not None
        known = self.mesh.mesh_dim_names or ()
        if self.dp_axis_names != ("dp",) or "dp" in known:
            return self.dp_axis_names
        if self.mesh.ndim == 1:
            return ()
        return OUR_DP_AXES if set(OUR_DP_AXES) <= set(known) else self.dp_axis_names

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        return self.pp_mesh.get_group()

    @property
    def pp_mesh(self) -> DeviceMesh:
        """The axis between stages."""
        assert self.mesh is not None
        return self.mesh[self.pp_axis_name]

    def sum_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups over which gradients of unsharded parameters are summed: data and context parallelism."""
        assert self.mesh is not None
        axes = [self.mesh[name] for name in (*self._dp_axes(), self.cp_axis_name) if name is not None]
        return [axis.get_group() for axis in axes if axis.size() > 1]

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of `parallelize_fn`."""
        return {
            "world_mesh": self.mesh,
            "moe_mesh": self.moe_mesh,
            "dp_axis_names": self.dp_axis_names,
            "cp_axis_name": self.cp_axis_name,
            "tp_axis_name": self.tp_axis_name,
            "ep_axis_name": self.ep_axis_name,
            "ep_shard_axis_names": self.ep_shard_axis_names,
        }


def check_batch_sizes(microbatch: int, batch: int, seq_len: int | None) -> None:
    """Raise ConfigError for invalid numbers of sequences per microbatch and step, or tokens per sequence."""
    check_range("pp_microbatch_size", microbatch, at_least=1, fix="pp_microbatch_size=1")
    if batch < 1 or batch % microbatch:
        raise ConfigError(
            f"pp_microbatch_size={microbatch} must divide pp_batch_size={batch}",
            code="not_divisible",
            keys=("pp_microbatch_size", "pp_batch_size"),
            fix=f"pp_microbatch_size={max((d for d in range(1, microbatch) if batch % d == 0), default=1)}",
        )
    check_range("pp_seq_len", seq_len, at_least=1, fix="pp_seq_len=null")


def default_device() -> torch.device:
    """Return the current accelerator, else the CPU, also if torch supports an accelerator that the machine lacks."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
