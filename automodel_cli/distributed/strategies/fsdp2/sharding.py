"""Apply FSDP2 to one part: units for layers, embedding and head, experts on their own mesh, gradients as sums."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.layer_wrapping import prepare_layers
from automodel_cli.distributed.mesh import Mesh, fsdp_mesh
from automodel_cli.distributed.mesh_config import AXES
from automodel_cli.distributed.sharded_module import Sharded, class_of, register_handle
from automodel_cli.distributed.strategies.fsdp2 import torch_compat
from automodel_cli.distributed.strategies.fsdp2.config import EXPERTS, FSDP2Config
from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion_linear
from automodel_cli.distributed.wgrad_fusion.linear import single_backward

logger = logging.getLogger(__name__)

_alone: WeakSet[object] = WeakSet()
_deferred: WeakSet[object] = WeakSet()


class FSDP2Sharded(Sharded):
    """Handle of a part under FSDP2, which works in place."""

    def __init__(self, part: nn.Module, *, every_microbatch: bool, kept: Sequence[FSDPModule] = ()):
        """Create the handle of a sharded part.

        Args:
            every_microbatch: reduce gradients after each microbatch.
            kept: units that stay gathered from their first use to the end of the last microbatch.
        """
        super().__init__(part)
        self._every_microbatch, self._kept = every_microbatch, kept
        self._late = late_units(part)

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        module = self.part
        assert isinstance(module, FSDPModule)
        reduce_in_backward(module, self._late, is_last=is_last, every_microbatch=self._every_microbatch)
        for unit in self._kept:
            unit.set_reshard_after_backward(is_last, recurse=False)
        try:
            with single_backward():
                yield
        finally:
            module.set_requires_gradient_sync(True)
            module.set_is_last_backward(True)

    @contextmanager
    def in_float32(self) -> Iterator[bool]:
        self.reshard()
        with torch_compat.computing_in(fsdp_modules(self.part), torch.float32):
            yield True
            self.reshard()

    def reshard(self) -> None:
        """Free gathered parameters.

        Until then, the module contains gathered plain tensors, but optimizer, checkpoint and export need shards.
        Gathered tensors are outdated after an update of the shards.
        """
        for module in fsdp_modules(self.part):
            module.reshard()


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


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all FSDP units, the root first."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def unsharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return FSDP units on a mesh of size 1 (typically experts).

    Their gradients need no reduction, so it is skipped until the last microbatch.
    """
    return [unit for unit in fsdp_modules(module) if unit in _alone]


def late_units(module: nn.Module) -> list[FSDPModule]:
    """Return FSDP units that reduce at the last microbatch in any case: unsharded ones, and experts whose reduction the
    config defers.
    """
    return [unit for unit in fsdp_modules(module) if unit in _alone or unit in _deferred]


def reduce_in_backward(root: FSDPModule, late: Sequence[FSDPModule], *, is_last: bool, every_microbatch: bool) -> None:
    """Set whether the next backward of `root` reduces gradients over ranks, or accumulates them unreduced.

    Units in `late` reduce at the last microbatch only. A backward that reduces waits for the reduction and frees its
    buffers.
    """
    root.set_requires_gradient_sync(is_last or every_microbatch)
    if every_microbatch and not is_last:
        # `recurse=False`, because a layer contains its experts, which may reduce at another time.
        for unit in late:
            unit.set_requires_gradient_sync(False, recurse=False)
    root.set_is_last_backward(is_last or every_microbatch)


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP2 sum gradients over ranks instead of averaging them, and skip the reduction on one rank.

    Call once, after wrapping.
    """
    by_itself = unsharded_units(module)
    for submodule in fsdp_modules(module):
        if submodule in by_itself:
            torch_compat.copy_once(submodule)
            continue  # The sum is the gradient itself. A factor would only copy it.
        # Neither setter is recursive. The second one selects a plain sum: without it torch uses a pre-multiplied sum,
        # which gloo does not support.
        submodule.set_gradient_divide_factor(1.0)
        submodule.set_force_sum_reduction_for_comms(True)


def enable_wgrad_fusion(module: nn.Module) -> None:
    """Accumulate weight gradients of linear layers and experts directly into the sum over microbatches."""
    from automodel_cli.distributed.expert_parallel.apply import is_experts

    of_owners: dict[nn.Module, dict[str, wgrad_fusion_linear.MainGrad]] = {}
    for unit in fsdp_modules(module):
        for owner, name, weight_sum in torch_compat.weight_sums(unit):
            of_owners.setdefault(owner, {})[name] = weight_sum
    for owner, sums in of_owners.items():
        # An exact type: a subclass (LoRA, 8-bit) may use its weight in another GEMM.
        if type(owner) is nn.Linear:
            wgrad_fusion_linear.fuse_wgrad(owner, sums.get("weight"))
        elif is_experts(owner) or class_of(owner) is nn.Linear:  # a head that is a unit, computed by `Head`
            wgrad_fusion_linear.set_main_grad(owner, sums)


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
    layers: Sequence[nn.Module], expert_mesh: DeviceMesh, options: dict[str, Any], *, reshard: bool
) -> list[FSDPModule]:
    """Shard the experts of all layers. `reshard` does not apply to the last layer, which backward needs first."""
    units: list[FSDPModule] = []
    for layer in layers:
        units += shard_experts(layer, expert_mesh, reshard=reshard and layer is not layers[-1], **options)
    return units


def _shard_around_layers(
    model: nn.Module, *, mp_policy: MixedPrecisionPolicy, **shard: Any
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Shard embedding and head, and return those that are units of their own (`ModelPart.units_around_layers`)."""
    find: Any = getattr(model, "units_around_layers", None)
    embedding, head = ([], []) if find is None else find()
    for module in (*embedding, *head):
        # The embedding receives tokens, and the head casts hidden states itself.
        policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)
        fully_shard(module, mp_policy=policy, reshard_after_forward=False, **shard)
    return embedding, head


def _shard_layers(
    model: nn.Module, layers: Sequence[nn.Module], *, reshard: bool, mp_policy: MixedPrecisionPolicy, **shard: Any
) -> list[nn.Module]:
    """Shard each layer, and return the modules in another dtype, which are units of their own. The last layer stays
    gathered."""
    wide: list[nn.Module] = []
    for unit in units_of(layers):
        resharded = reshard and layers[-1] not in unit
        # Inner units first: FSDP2 assigns a parameter to the innermost unit around it. The layer then gets the rest.
        for module in modules_in_other_dtype(model, unit):
            fully_shard(module, mp_policy=stored_precision(mp_policy), reshard_after_forward=resharded, **shard)
            wide.append(module)
        fully_shard(unit, mp_policy=mp_policy, reshard_after_forward=resharded, **shard)
    return wide


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
    shard: dict[str, Any] = {"mesh": mesh, "offload_policy": offload_policy or OffloadPolicy()}
    # output_dtype belongs to the root. On a layer it would pass float32 to the bfloat16 norm of the next layer.
    layer_policy = dataclasses.replace(policy, output_dtype=None)
    kept: list[FSDPModule] = []
    if expert_mesh is not None:
        keep = config.keep_cast_experts is True
        options = {"mp_policy": layer_policy, "offload_policy": shard["offload_policy"]}
        units = _shard_experts_of(layers, expert_mesh, options, reshard=pp_size == 1 and not keep)
        kept = units if keep else []
        if config.defer_fsdp_grad_sync == EXPERTS:
            _deferred.update(units)
    wide = _shard_layers(model, layers, reshard=pp_size == 1, mp_policy=layer_policy, **shard)
    modules_in_other_dtype(model, [model], separate=False)
    embedding, head = _shard_around_layers(model, mp_policy=layer_policy, **shard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **shard)
    if mesh.size() == 1:
        _alone.update(unit for unit in (*wide, *layers, *embedding, *head, model) if isinstance(unit, FSDPModule))
    sum_gradients(model)
    if config.adds_in_products:
        enable_wgrad_fusion(model)
    register_handle(FSDP2Sharded(model, every_microbatch=config.reduces_every_microbatch, kept=kept), model)
    if config.enable_fsdp2_prefetch:
        run_in_order = [*embedding, *layers, *head]
        chain_prefetch(model, run_in_order, config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth)
    logger.info("fsdp2: %d layers over %s ranks, %s", len(layers), tuple(mesh.shape), policy)
    return model


def modules_in_other_dtype(model: nn.Module, roots: Sequence[nn.Module], *, separate: bool = True) -> list[nn.Module]:
    """Return the outermost modules below `roots` whose trainable parameters have another dtype than most of `model`.

    Families keep some parameters in float32 if the rest is bfloat16 (router gates). FSDP2 requires one dtype per unit.
    Raises ConfigError for a module with several dtypes, and for any such module if not `separate`: the head reads
    parameters of the root without calling their modules.
    """
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        # Weighted by size: many small float32 norms do not outvote a few large bfloat16 matrices.
        sizes[param.dtype] += param.numel() * param.requires_grad
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)  # A stage may have no parameters.
    found: list[nn.Module] = []
    known = {module for unit in fsdp_modules(model) for module in cast("nn.Module", unit).modules()}
    for module in (module for root in roots for module in root.modules()):
        own = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad and p.dtype != usual]
        if not own or module in known:
            continue
        if not separate or any(param.requires_grad and param.dtype == usual for param in module.parameters()):
            raise ConfigError(
                f"model.dtype={str(usual).removeprefix('torch.')} is not supported with parallelizer=fsdp2, because "
                f"the model keeps {own[0]} of {type(module).__name__} in another dtype than the parameters around it",
                code="not_supported_by_model",
                keys=("model.dtype", "parallelizer"),
                fix="model.dtype=float32",
            )
        found.append(module)
        known.update(module.modules())
    return found


def stored_precision(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of a unit that computes in the dtype in which it is stored, as transformers does."""
    return dataclasses.replace(policy, param_dtype=None, cast_forward_inputs=False)


def units_of(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group layers into FSDP units: one per layer, except that layers with shared parameters form one unit (Zamba).

    FSDP2 shards a parameter in the unit in which it finds it. Another unit would keep using a copy.
    """
    units: list[list[nn.Module]] = []
    for layer in layers:
        params = {id(param) for param in layer.parameters()}
        # Example: layers A, B, C where A and C share a block give the units [A, C] and [B].
        sharing = [unit for unit in units if any(id(p) in params for other in unit for p in other.parameters())]
        if not sharing:
            units.append([layer])
            continue
        sharing[0] += [other for unit in sharing[1:] for other in unit] + [layer]
        units = [unit for unit in units if unit not in sharing[1:]]
    return units


def shard_experts(
    layer: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard: bool,
) -> list[FSDPModule]:
    """Shard the experts of a layer on their own mesh, and return their units.

    Other ranks have other experts, so only `mesh` shards them and sums their gradients.
    """
    from automodel_cli.distributed.expert_parallel.apply import experts_modules

    # The layer has cast its inputs. Routing weights in float32 stay so, as without a mesh.
    mp_policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    for experts in experts_modules(layer):
        fully_shard(
            experts, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy, reshard_after_forward=reshard
        )
        if mesh.size() == 1:
            _alone.add(experts)
    return fsdp_modules(layer)


def chain_prefetch(root: nn.Module, layers: Sequence[nn.Module], forward_depth: int, backward_depth: int) -> None:
    """Gather the next layers during computation: `forward_depth` ahead in forward, `backward_depth` in backward.

    Includes units inside layers (experts). In expert-parallel layers the host waits for the device, and without a chain
    it would start to gather the experts after that.
    """
    units = [fsdp_modules(layer) for layer in layers]  # the layer first, then the units in it
    assert all(isinstance(module, FSDPModule) for module in (root, *layers)), "prefetch needs modules that are sharded"
    assert isinstance(root, FSDPModule)
    for i, (layer, *_) in enumerate(units):
        # Example: layers 0 1 2 3, forward depth 2. While layer 0 runs, 1 and 2 are gathered. With backward depth 1,
        # layer 3 prefetches 2. A larger depth hides slow links and keeps more layers gathered.
        layer.set_modules_to_forward_prefetch(_flat(units[i + 1 : i + 1 + forward_depth]))
        layer.set_modules_to_backward_prefetch(_flat(units[max(0, i - backward_depth) : i][::-1]))
    root.set_modules_to_forward_prefetch(_flat(units[:forward_depth]))
    root.set_modules_to_backward_prefetch(_flat(units[::-1][:backward_depth]))


def _flat(units: Sequence[Sequence[FSDPModule]]) -> list[FSDPModule]:
    return [unit for inside in units for unit in inside]
