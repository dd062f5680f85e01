"""Arguments of the package `megatron-fsdp`: unit modules, the mesh of shards, and the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.import_classes import import_classes_from_paths
from automodel_cli.distributed.mesh import fsdp_mesh
from automodel_cli.distributed.mesh_config import AXES
from automodel_cli.distributed.torch_compat import joined


def unit_modules(model: nn.Module, requested: Sequence[str | type[nn.Module]] | None) -> list[type[nn.Module]]:
    """Return the classes that are gathered as one unit: `requested`, or the classes that the model declares as
    unsplittable.

    Raises ConfigError for a class that the model does not contain.
    """
    inside = {type(module) for module in model.modules()}
    if requested:
        classes = [
            kind
            for entry in requested
            for kind in (import_classes_from_paths([entry]) if isinstance(entry, str) else [entry])
        ]
        absent = [kind.__name__ for kind in classes if not any(issubclass(other, kind) for other in inside)]
    else:
        # The declaration of transformers (a list or set of class names), on the model and its inner models.
        declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        classes = [kind for kind in inside if kind.__name__ in declared]
        absent = [] if classes else sorted(declared) or ["_no_split_modules"]
    if absent:
        raise ConfigError(
            f"megatron_fsdp_unit_modules={','.join(absent)} matches no module of {type(model).__name__}",
            code="unknown_name",
            keys=("megatron_fsdp_unit_modules",),
            fix=f"parallelizer.megatron_fsdp_unit_modules=[{','.join(_layer_classes(inside))}]",
        )
    return classes


def _layer_classes(inside: set[type[nn.Module]]) -> list[str]:
    """Return import paths of the layer classes of a model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [kind for kind in inside if issubclass(kind, GradientCheckpointingLayer)]
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in layers) or ["<the class of this model's layers>"]


def sharding_mesh(device_mesh: DeviceMesh, dp_dim: str, tp_dim: str) -> tuple[DeviceMesh, str]:
    """Return a mesh of exactly (shard, tp) and the name of its first axis.

    The package looks up axes by name on this mesh. It would not find a flattened dp x cp axis, and cp would silently be
    excluded from sharding.
    """
    names = device_mesh.mesh_dim_names or ()
    replicate, dp = ("dp_replicate", "dp_shard") if names == AXES else ("", dp_dim)
    if replicate and device_mesh[replicate].size() > 1:
        raise ConfigError(
            "hybrid sharding (mesh.dp_replicate_size) is not supported with megatron_fsdp",
            code="unsupported_combination",
            keys=("mesh.dp_replicate_size",),
            fix="mesh.dp_replicate_size=1, or parallelizer=fsdp2",
        )
    if dp not in names or tp_dim not in names:
        raise ConfigError(
            f"megatron_fsdp needs the mesh axes {dp} and {tp_dim}, but the mesh has: {', '.join(names) or 'none'}",
            code="unknown_name",
            keys=("device_mesh",),
        )
    if "cp" not in names or device_mesh["cp"].size() == 1:
        return device_mesh[dp, tp_dim], dp
    shard = fsdp_mesh(device_mesh) if names == AXES else device_mesh[dp, "cp"]._flatten(f"{dp}_cp")
    (name,) = shard.mesh_dim_names or ("",)
    return joined(shard, device_mesh[tp_dim]), name


def current_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
