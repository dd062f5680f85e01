"""Which modules of a part are units of FSDP2: layers, modules in another dtype, and experts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import fsdp_modules, unsharded


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
            unsharded.add(experts)
    return fsdp_modules(layer)
