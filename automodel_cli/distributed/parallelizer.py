"""Parallelize one part of a model. Order of all transformations::

    fused ops -> tensor parallel -> float8 -> expert parallel -> context parallel -> activation checkpointing ->
    compile each layer -> data parallel (a strategy of `strategies/`)

Fused ops come first, because other transformations wrap their modules. Data parallelism comes last: it shards the
parameters that tensor and expert parallelism leave on this rank. It is applied on one rank too, where it sets up mixed
precision. FSDP2 is skipped if it would have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.compile_modes import FUSED_OPS
from automodel_cli.distributed.expert_parallel.apply import apply_expert_parallel, multiply_in_fp8
from automodel_cli.distributed.expert_parallel.router_detection import fuse_routers
from automodel_cli.distributed.float8 import linear as float8_linear
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.fusion.patterns import fuse_layers
from automodel_cli.distributed.fusion_coverage import check_coverage, family_of
from automodel_cli.distributed.import_classes import import_classes_from_paths
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.qat import linear as qat_linear
from automodel_cli.distributed.strategies.base import BuiltInStrategy, Strategy
from automodel_cli.distributed.strategies.ddp.config import DDPConfig
from automodel_cli.distributed.strategies.ddp.wrap import ddp_parallelize
from automodel_cli.distributed.strategies.fsdp2.config import FSDP2Config
from automodel_cli.distributed.strategies.fsdp2.sharding import fsdp2_parallelize, fsdp2_strategy_parallelize
from automodel_cli.distributed.strategies.megatron_fsdp.config import MegatronFSDPConfig
from automodel_cli.distributed.strategies.megatron_fsdp.sharding import megatron_parallelize, require_megatron_fsdp

__all__ = ["fsdp2_strategy_parallelize", "import_classes_from_paths", "parallelize", "to_cpu"]

SHARD: dict[type, Callable[[nn.Module, Mesh, Any], nn.Module]] = {
    DDPConfig: ddp_parallelize,
    FSDP2Config: fsdp2_parallelize,
    MegatronFSDPConfig: megatron_parallelize,
}
"""Config node of a built-in strategy -> the function that shards: `(part, mesh, node)`."""


def parallelize(part: nn.Module, mesh: Mesh, strategy: Strategy) -> nn.Module:
    """Apply a strategy to one part, preferably on the meta device, and return the module to run.

    The result is `part` itself or a wrapper around it (`sharded_module.handle_of`). Gradients are sums over ranks. Load
    parameters afterwards. Collective over the ranks of this part. Raises ConfigError if the strategy does not support
    the mesh.
    """
    strategy.check_mesh(mesh.layout.to_config())
    strategy.check_installed()
    if isinstance(strategy, MegatronFSDPConfig):
        require_megatron_fsdp()
    options = strategy.axis_options()
    stored = next((param.dtype for param in part.parameters() if param.is_floating_point()), torch.float32)
    fuser = compiled_regions.region_compiler_for(
        strategy.enable_compile, strategy.compile_backend, mesh.device, strategy.compute_dtype() or stored
    )
    if fuser is not None:
        check_coverage(part, family_of(part), by_name=strategy.enable_compile == FUSED_OPS)
        fuse_layers(part, fuser)
        fuse_routers(part, mesh.device.type)
    if mesh.layout.tp > 1:
        from automodel_cli.distributed.tensor_parallel.apply import apply_tensor_parallel

        apply_tensor_parallel(part, mesh.tp, options, shard_experts=mesh.ep is None)
    # The order of the steps matters. Fused ops first: they look at the family's own forwards. Tensor parallelism before
    # float8: whether a layer divides depends on its shard. Experts before FSDP, which shards what ep leaves on a rank.
    # Data parallelism last, because it wraps everything else.
    float8_linear.exclude_indivisible(part, mesh.device, fuser)
    qat_linear.settle(part, strategy.compute_dtype() or stored)
    if mesh.ep is not None:
        # Compiled layers have their own order of operations.
        apply_expert_parallel(
            part, mesh, options.expert_dispatch, fuser, overlap_shared_experts=strategy.enable_compile is not True
        )
    else:
        multiply_in_fp8(part, mesh, fuser)
    if isinstance(fuser, compiled_regions.Compiled):
        fuser.settle(by_name=strategy.enable_compile == FUSED_OPS)
    if mesh.layout.cp > 1:
        from automodel_cli.distributed.context_parallel import apply_context_parallel

        apply_context_parallel(part, mesh.cp, ring=options.ring)
    return _shard(part, mesh, strategy)


def _shard(part: nn.Module, mesh: Mesh, strategy: Strategy) -> nn.Module:
    """Call `shard` of the strategy, or the function that is registered for a built-in node."""
    if type(strategy).shard is BuiltInStrategy.shard:
        for kind, shard in SHARD.items():
            if isinstance(strategy, kind):
                return shard(part, mesh, strategy)
    return strategy.shard(part, mesh)


def to_cpu(value: object) -> object:
    """Copy a tensor to host memory. Return any other value unchanged.

    A DTensor on CUDA or CPU is gathered to the full tensor on every rank (collective). Raises ValueError for a DTensor
    on another device.
    """
    match value:
        case DTensor() if value.device.type not in ("cuda", "cpu"):
            raise ValueError(f"a DTensor on device {value.device} cannot be brought to the CPU: only cuda and cpu can")
        case DTensor():
            return value.full_tensor().cpu()
        case Tensor():
            return value.cpu()
    return value
