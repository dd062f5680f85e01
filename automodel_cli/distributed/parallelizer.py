"""From one part of a model to the same part on many ranks. The order of everything, on one screen:

    tensor parallel -> expert parallel -> context parallel -> activation checkpointing -> compile, layer by layer
    -> data parallel (FSDP2, hybrid sharding, DDP, Megatron-FSDP)

Data parallelism shards what tensor and expert parallelism left on this rank, and owns the outermost parameters; compile
must see the checkpointing inside the layer. Data parallelism is applied on one rank too: there it still installs mixed
precision and keeps every parameter of one kind.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.activation_checkpointing import apply_activation_checkpointing
from automodel_cli.distributed.config import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    ParallelizerConfig,
    torch_dtype,
)
from automodel_cli.distributed.gradients import sum_gradients, sync_every_microbatch
from automodel_cli.distributed.layout import AXES
from automodel_cli.distributed.megatron_fsdp import megatron_fsdp_strategy_parallelize, require_megatron_fsdp
from automodel_cli.distributed.mesh import Mesh, fsdp_mesh

logger = logging.getLogger(__name__)


def parallelize(part: nn.Module, mesh: Mesh, config: ParallelizerConfig) -> nn.Module:
    """Apply a strategy to one part, preferably still on the meta device; its parameters are filled afterwards.

    FSDP2 works in place and returns `part`; DDP and Megatron-FSDP return a wrapper, which `gradients.unwrap` takes off.
    Gradients are sums over ranks with each. Collective over the ranks that hold this part. Raises ConfigError for what
    the strategy cannot do on this mesh.
    """
    config.check_mesh(mesh.layout.to_config())
    if isinstance(config, DDPConfig):
        return ddp_parallelize(part, mesh, config)
    assert isinstance(config, (FSDP2Config, MegatronFSDPConfig)), f"no parallelizer for {type(config).__name__}"
    if isinstance(config, MegatronFSDPConfig):
        require_megatron_fsdp()
    if mesh.layout.tp > 1:
        from automodel_cli.distributed.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(part, mesh.tp, config, shard_experts=mesh.ep is None)
    if mesh.ep is not None:
        from automodel_cli.distributed.expert_parallel import apply_expert_parallel

        assert isinstance(config, FSDP2Config), "check_mesh lets no other strategy distribute experts"
        apply_expert_parallel(part, mesh, config)
    if mesh.layout.cp > 1:
        from automodel_cli.distributed.context_parallel import apply_context_parallel

        apply_context_parallel(part, mesh.cp, config)
    if isinstance(config, MegatronFSDPConfig):
        return megatron_parallelize(part, mesh, config)
    mp_policy, offload_policy = config.build_mp_policy(), config.build_offload_policy(mesh.device.type)
    return fsdp2_strategy_parallelize(
        part,
        mesh.fsdp,
        mp_policy,
        None,
        offload_policy,
        config=config,
        pp_size=mesh.layout.pp,
        expert_mesh=mesh.ep_shard,
    )


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: dict[str, Any] | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    config: FSDP2Config | None = None,
    pp_size: int = 1,
    expert_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard `model` in place: every layer is one FSDP2 unit, the rest (embedding, last norm, head) belongs to the root.

    `device_mesh` is `(shard,)` or `(replicate, shard)`, or the root mesh with its five axes: then layers are first
    sharded over its tp axis, by `tp_shard_plan` or else the model's own plan. `mp_policy` None means
    bfloat16 compute with float32 reduction. `config` brings the options that are not policies. Parameters are resharded
    after forward except those that backward needs first (the last layer, the root), and except under a pipeline, where
    every microbatch would gather them again and zero-bubble schedules lose gradients.
    """
    config = config or FSDP2Config()
    tp_mesh = device_mesh["tp"] if device_mesh.mesh_dim_names == AXES else None
    if tp_mesh is not None and tp_mesh.size() > 1:
        from automodel_cli.distributed.tensor_parallel import apply_tensor_parallel

        plan = config.tp_plan if tp_shard_plan is None else tp_shard_plan
        apply_tensor_parallel(model, tp_mesh, dataclasses.replace(config, tp_plan=plan))
    elif tp_shard_plan is not None:
        raise ConfigError("tp_shard_plan needs tensor parallelism", keys=("tp_plan",), fix="parallelizer.tp_plan=null")
    mesh = fsdp_mesh(device_mesh) if device_mesh.mesh_dim_names == AXES else device_mesh
    policy = mp_policy or config.build_mp_policy()
    layers = prepare_layers(model, config, device_mesh.device_type)
    shard: dict[str, Any] = {"mesh": mesh, "offload_policy": offload_policy or OffloadPolicy()}
    # output_dtype belongs to the root: on a layer it would feed float32 into the next layer's bfloat16 norm.
    layer_policy = dataclasses.replace(policy, output_dtype=None)
    for i, layer in enumerate(layers):
        reshard = pp_size == 1 and i < len(layers) - 1
        if expert_mesh is not None:
            shard_experts(
                layer, expert_mesh, mp_policy=layer_policy, offload_policy=shard["offload_policy"], reshard=reshard
            )
        fully_shard(layer, mp_policy=layer_policy, reshard_after_forward=reshard, **shard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **shard)
    sum_gradients(model)
    if config.enable_fsdp2_prefetch:
        chain_prefetch(model, layers, config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth)
    if not config.defer_fsdp_grad_sync:
        sync_every_microbatch(model)
    logger.info("fsdp2: %d layers over %s ranks, %s", len(layers), tuple(mesh.shape), policy)
    return model


def shard_experts(
    layer: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard: bool,
) -> None:
    """Shard the layer's experts on their own mesh: other ranks hold other experts, so only `mesh` shards and sums."""
    from automodel_cli.distributed.expert_parallel import experts_modules

    # The layer has cast its inputs; routing weights that a family computes in float32 stay so, as without a mesh.
    mp_policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    for experts in experts_modules(layer):
        fully_shard(
            experts, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy, reshard_after_forward=reshard
        )


def ddp_parallelize(part: nn.Module, mesh: Mesh, config: DDPConfig) -> DistributedDataParallel:
    """Wrap a part whose parameters are whole on every rank. Meta parameters are allocated first, still unfilled: DDP
    builds its buckets around the tensors themselves. Whoever fills them must give every rank the same values."""
    layers = prepare_layers(part, config, mesh.device.type)
    if config.enable_compile:
        # Cuts graphs at bucket boundaries, which layers do already, and cannot cut a checkpointed layer.
        torch._dynamo.config.optimize_ddp = False
    materialize(part, mesh.device)
    wrapped = DistributedDataParallel(
        part,
        process_group=mesh.dp.get_group(),
        init_sync=False,
        broadcast_buffers=config.broadcast_buffers,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        bucket_cap_mb=config.bucket_cap_mb,
    )
    sum_gradients(wrapped)
    logger.info("ddp: %d layers on each of %d ranks", len(layers), mesh.dp_size)
    return wrapped


def megatron_parallelize(part: nn.Module, mesh: Mesh, config: MegatronFSDPConfig) -> nn.Module:
    """Shard a part by Megatron-FSDP. Meta parameters are allocated first, still unfilled, unless the package shards on
    meta: it copies them into its buffers."""
    prepare_layers(part, config, mesh.device.type)
    if not config.init_fsdp_with_meta_device:
        materialize(part, mesh.device)
    module, _ = megatron_fsdp_strategy_parallelize(
        part,
        mesh.root,
        config.megatron_fsdp_unit_modules,
        None,
        config.zero_dp_strategy,
        config.init_fsdp_with_meta_device,
        config.grad_reduce_in_fp32,
        config.preserve_fp32_weights,
        config.overlap_grad_reduce,
        config.overlap_param_gather,
        check_for_nan_in_grad=False,  # the training step checks the norm of all gradients, and names the rows
        disable_bucketing=config.disable_bucketing,
        calculate_per_token_loss=True,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer,
    )
    return module


def prepare_layers(model: nn.Module, config: ParallelizerConfig, device_type: str) -> list[nn.Module]:
    """What comes before data parallelism, the same for every strategy. Returns the layers."""
    layers = transformer_layers(model)
    apply_activation_checkpointing(layers, config.activation_checkpointing)
    if config.enable_compile:
        # A graph break inside a checkpointed layer makes the compiler leave the whole layer alone, and say nothing.
        whole = bool(config.activation_checkpointing)
        for layer in layers:  # in place: parameter names stay, unlike with torch.compile(layer)
            layer.compile(backend=config.compile_backend, fullgraph=whole)
    if config.autocast_dtype is not None:
        autocast = torch.autocast(device_type, torch_dtype(config.autocast_dtype))
        model.forward = autocast(model.forward)  # type: ignore[method-assign]  # the whole part, whoever calls it
    return layers


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of an unmodified library model, in the order of `model.modules()`, none inside another.

    A pipeline stage may have none: all slots of its decoder list are then without parameters.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    is_empty_stage = bool(lists) and not any(True for entries in lists for _ in entries.parameters())
    if not layers and not is_empty_stage:
        raise ConfigError(
            f"{type(model).__name__} has no layers that the library marks as blocks: none of its modules is a "
            "GradientCheckpointingLayer",
            fix="use a decoder model that transformers' own Trainer can checkpoint",
        )
    return layers


def chain_prefetch(root: nn.Module, layers: Sequence[nn.Module], forward_depth: int, backward_depth: int) -> None:
    """Gather the next layers while one computes: `forward_depth` ahead in forward, `backward_depth` in backward."""
    units: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    assert len(units) == len(layers) and isinstance(root, FSDPModule), "prefetch is for modules that FSDP2 has sharded"
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + forward_depth])
        unit.set_modules_to_backward_prefetch(units[max(0, i - backward_depth) : i][::-1])
    root.set_modules_to_forward_prefetch(units[:forward_depth])
    root.set_modules_to_backward_prefetch(units[::-1][:backward_depth])


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter and buffer unfilled storage on `device`. Tied parameters stay one parameter."""
    real: dict[Tensor, Tensor] = {}

    def storage(tensor: Tensor) -> Tensor:
        if tensor not in real:
            empty = torch.empty_like(tensor, device=device)
            real[tensor] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return real[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = storage(tensor)  # type: ignore[assignment]


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
