"""From one part of a model to the same part on many ranks. The order of everything, on one screen:

    glue -> tensor parallel -> 8-bit products -> expert parallel -> context parallel -> activation checkpointing ->
    compile, layer by layer -> data parallel, which a strategy of `strategies/` does

Glue is compiled inside the modules that all others wrap. Data parallelism shards what tensor and expert parallelism
left on this rank, and owns the outermost parameters. It is applied on one rank too, where it still installs mixed
precision; FSDP2 leaves a rank alone that it has nothing to do for.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed import fp8_linear, fused
from automodel_cli.distributed.expert_parallel import apply_expert_parallel, multiply_in_fp8
from automodel_cli.distributed.glue import fuse_layers
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.routing import fuse_routers
from automodel_cli.distributed.strategies.base import GLUE, Strategy
from automodel_cli.distributed.strategies.fsdp2.sharding import fsdp2_strategy_parallelize

__all__ = ["fsdp2_strategy_parallelize", "import_classes_from_paths", "parallelize", "to_cpu"]


def parallelize(part: nn.Module, mesh: Mesh, strategy: Strategy) -> nn.Module:
    """Apply a strategy to one part, preferably still on the meta device; its parameters are filled afterwards.

    Returns the module that runs: `part` itself, or a wrapper around it (`sharded.handle_of`). Gradients are sums over
    ranks with each. Collective over the ranks that hold this part. Raises ConfigError for what the strategy cannot do
    on this mesh.
    """
    strategy.check_mesh(mesh.layout.to_config())
    strategy.check_installed()
    options = strategy.axis_options()
    stored = next((param.dtype for param in part.parameters() if param.is_floating_point()), torch.float32)
    fuser = fused.chosen(
        strategy.enable_compile, strategy.compile_backend, mesh.device, strategy.compute_dtype() or stored
    )
    if fuser is not None:
        fuse_layers(part, fuser)
        fuse_routers(part, mesh.device.type)
    if mesh.layout.tp > 1:
        from automodel_cli.distributed.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(part, mesh.tp, options, shard_experts=mesh.ep is None)
    fp8_linear.prepare(part, mesh.device, fuser)
    if mesh.ep is not None:
        # whole layers that are compiled have their own order
        apply_expert_parallel(part, mesh, options.expert_dispatch, fuser, beside=strategy.enable_compile is not True)
    else:
        multiply_in_fp8(part, mesh, fuser)
    if isinstance(fuser, fused.Compiled):
        fuser.settle(by_name=strategy.enable_compile == GLUE)
    if mesh.layout.cp > 1:
        from automodel_cli.distributed.context_parallel import apply_context_parallel

        apply_context_parallel(part, mesh.cp, ring=options.ring)
    return strategy.shard(part, mesh)


def import_classes_from_paths(paths: list[str]) -> list[type]:
    """`["torch.optim.AdamW"]` -> `[AdamW]`. Raises ConfigError that names the path and why it is no class."""
    return [_import_class(path) for path in paths]


def _import_class(path: str) -> type:
    if not isinstance(path, str) or not all(path.split(".")) or "." not in path:
        raise ConfigError(f"{path!r} is not the import path of a class (package.module.Class)")
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module may fail in any way while it is imported
        raise ConfigError(f"{path} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{path} is no class but {type(found).__name__}")
    return found


def to_cpu(value: object) -> object:
    """A tensor's value in host memory; anything else unchanged.

    A DTensor gives its full tensor, on every rank (collective), whether its shards are on CUDA or on the CPU. Raises
    ValueError for a DTensor on another device.
    """
    if isinstance(value, DTensor):
        if value.device.type not in ("cuda", "cpu"):
            raise ValueError(f"a DTensor on device {value.device} cannot be brought to the CPU: only cuda and cpu can")
        return value.full_tensor().cpu()
    return value.cpu() if isinstance(value, Tensor) else value
