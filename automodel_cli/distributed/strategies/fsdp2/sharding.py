"""Apply FSDP2 to one part: units for layers, embedding and head, experts on their own mesh, gradients as sums."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.layer_wrapping import prepare_layers
from automodel_cli.distributed.mesh import Mesh, fsdp_mesh
from automodel_cli.distributed.mesh_config import AXES
from automodel_cli.distributed.sharded_module import register_handle
from automodel_cli.distributed.strategies.fsdp2.config import EXPERTS, FSDP2Config
from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import (
    FSDP2Sharded,
    deferred,
    enable_wgrad_fusion,
    fsdp_modules,
    sum_gradients,
    unsharded,
)
from automodel_cli.distributed.strategies.fsdp2.units import (
    modules_in_other_dtype,
    shard_experts,
    stored_precision,
    units_of,
)

_Shard = Callable[..., object]
"""`fully_shard` with the mesh and the offload policy."""
logger = logging.getLogger(__name__)


def fsdp2_parallelize(part: nn.Module, mesh: Mesh, config: FSDP2Config) -> nn.Module:
    """Shard a part with the options of the node, on the meshes of the run. Returns `part`."""
    if is_noop(part, mesh, config):
        prepare_layers(part, config, mesh.device.type)
        return part
    return fsdp2_strategy_parallelize(
        part,
        mesh.fsdp,
        config.build_mp_policy(),
        None,
        config.build_offload_policy(mesh.device.type),
        config=config,
        pp_size=mesh.layout.pp,
        expert_mesh=mesh.ep_shard,
    )


def is_noop(part: nn.Module, mesh: Mesh, config: FSDP2Config) -> bool:
    """Return whether FSDP2 would have no effect: one rank and a policy that casts nothing.

    It would still take a fifth of the step time of a small model.
    """
    policy, stored = config.build_mp_policy(), {param.dtype for param in part.parameters()}
    casts = [dtype for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype is not None]
    in_parallel = mesh.layout.world_size > 1 or config.offload_policy is not None
    # A policy that casts is no no-op, even on one rank: bfloat16 compute of float32 parameters.
    return not in_parallel and policy.output_dtype is None and all({dtype} == stored for dtype in casts)


def _apply_tp_plan(
    model: nn.Module, device_mesh: DeviceMesh, config: FSDP2Config, tp_shard_plan: dict[str, object] | None
) -> None:
    tp_mesh = device_mesh["tp"] if device_mesh.mesh_dim_names == AXES else None
    if tp_mesh is not None and tp_mesh.size() > 1:
        from automodel_cli.distributed.tensor_parallel.apply import apply_tensor_parallel

        plan = config.tp_plan if tp_shard_plan is None else tp_shard_plan
        apply_tensor_parallel(model, tp_mesh, dataclasses.replace(config.axis_options(), tp_plan=plan))
    elif tp_shard_plan is not None:
        raise ConfigError(
            "tp_shard_plan needs tensor parallelism",
            code="requires_setting",
            keys=("tp_plan",),
            fix="parallelizer.tp_plan=null",
        )


def _shard_experts_of(
    layers: Sequence[nn.Module],
    expert_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    *,
    reshard: bool,
) -> list[FSDPModule]:
    """Shard the experts of all layers. `reshard` does not apply to the last layer, which backward needs first."""
    units: list[FSDPModule] = []
    for layer in layers:
        kept = layer is layers[-1]
        units += shard_experts(
            layer, expert_mesh, mp_policy=mp_policy, offload_policy=offload_policy, reshard=reshard and not kept
        )
    return units


def _shard_around_layers(
    model: nn.Module, shard: _Shard, *, mp_policy: MixedPrecisionPolicy
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Shard embedding and head, and return those that are units of their own (`ModelPart.units_around_layers`)."""
    find = getattr(model, "units_around_layers", None)
    embedding, head = ([], []) if find is None else find()
    for module in (*embedding, *head):
        # The embedding receives tokens, and the head casts hidden states itself.
        policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)
        shard(module, mp_policy=policy, reshard_after_forward=False)
    return embedding, head


def _shard_layers(
    model: nn.Module, layers: Sequence[nn.Module], shard: _Shard, *, reshard: bool, mp_policy: MixedPrecisionPolicy
) -> list[nn.Module]:
    """Shard each layer, and return the modules in another dtype, which are units of their own. The last layer stays
    gathered."""
    wide: list[nn.Module] = []
    for unit in units_of(layers):
        resharded = reshard and layers[-1] not in unit
        # Inner units first: FSDP2 assigns a parameter to the innermost unit around it. The layer then gets the rest.
        for module in modules_in_other_dtype(model, unit):
            shard(module, mp_policy=stored_precision(mp_policy), reshard_after_forward=resharded)
            wide.append(module)
        shard(unit, mp_policy=mp_policy, reshard_after_forward=resharded)
    return wide


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: dict[str, object] | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    config: FSDP2Config | None = None,
    pp_size: int = 1,
    expert_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard `model` in place. Every layer is one FSDP2 unit. So are embedding and head, if they have different weights
    (`ModelPart.units_around_layers`): layers then do not wait for the head to be gathered, and its gradient is reduced
    during their backward. The rest belongs to the root.

    Parameters are resharded after forward, with these exceptions. The last layer, the head and the root stay gathered,
    because backward needs them first, and the embedding, whose backward does not read it. Under a pipeline all stay
    gathered: otherwise every microbatch would gather them again, and zero-bubble schedules would compute wrong
    gradients.

    Args:
        device_mesh: `(shard,)`, `(replicate, shard)`, or the root mesh with its five axes. With the root mesh, layers
            are first sharded over its tp axis.
        mp_policy: None means bfloat16 compute with float32 reduction.
        tp_shard_plan: tensor-parallel plan. None: the plan of `config` or of the model.
        config: the options that are not policies.
        pp_size: number of pipeline stages.
        expert_mesh: mesh that shards each expert.
    """
    config = config or FSDP2Config()
    _apply_tp_plan(model, device_mesh, config, tp_shard_plan)
    mesh = fsdp_mesh(device_mesh) if device_mesh.mesh_dim_names == AXES else device_mesh
    policy = mp_policy or config.build_mp_policy()
    layers = prepare_layers(model, config, device_mesh.device_type)
    offload_policy = offload_policy or OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, offload_policy=offload_policy)
    # output_dtype belongs to the root. On a layer it would pass float32 to the bfloat16 norm of the next layer.
    layer_policy = dataclasses.replace(policy, output_dtype=None)
    kept: list[FSDPModule] = []
    if expert_mesh is not None:
        keep = config.keep_cast_experts is True
        units = _shard_experts_of(layers, expert_mesh, layer_policy, offload_policy, reshard=pp_size == 1 and not keep)
        kept = units if keep else []
        if config.defer_fsdp_grad_sync == EXPERTS:
            deferred.update(units)
    wide = _shard_layers(model, layers, shard, reshard=pp_size == 1, mp_policy=layer_policy)
    modules_in_other_dtype(model, [model], separate=False)
    embedding, head = _shard_around_layers(model, shard, mp_policy=layer_policy)
    root = shard(model, mp_policy=policy, reshard_after_forward=False)
    if mesh.size() == 1:
        unsharded.update((*wide, *layers, *embedding, *head, model))
    sum_gradients(model)
    if config.adds_in_products:
        enable_wgrad_fusion(model)
    register_handle(FSDP2Sharded(model, every_microbatch=config.reduces_every_microbatch, kept=kept), model)
    if config.enable_fsdp2_prefetch:
        run_in_order = [*embedding, *layers, *head]
        chain_prefetch(root, run_in_order, config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth)
    logger.info("fsdp2: %d layers over %s ranks, %s", len(layers), tuple(mesh.shape), policy)
    return model


def chain_prefetch(root: FSDPModule, layers: Sequence[nn.Module], forward_depth: int, backward_depth: int) -> None:
    """Gather the next layers during computation: `forward_depth` ahead in forward, `backward_depth` in backward.

    Includes units inside layers (experts). In expert-parallel layers the host waits for the device, and without a chain
    it would start to gather the experts after that.
    """
    units = [fsdp_modules(layer) for layer in layers]  # the layer first, then the units in it
    for i, (layer, *_) in enumerate(units):
        # Example: layers 0 1 2 3, forward depth 2. While layer 0 runs, 1 and 2 are gathered. With backward depth 1,
        # layer 3 prefetches 2. A larger depth hides slow links and keeps more layers gathered.
        layer.set_modules_to_forward_prefetch(_flat(units[i + 1 : i + 1 + forward_depth]))
        layer.set_modules_to_backward_prefetch(_flat(units[max(0, i - backward_depth) : i][::-1]))
    root.set_modules_to_forward_prefetch(_flat(units[:forward_depth]))
    root.set_modules_to_backward_prefetch(_flat(units[::-1][:backward_depth]))


def _flat(units: Sequence[Sequence[FSDPModule]]) -> list[FSDPModule]:
    return [unit for inside in units for unit in inside]
