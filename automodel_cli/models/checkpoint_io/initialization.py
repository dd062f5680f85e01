"""Random weights and computed buffers: the initialization of the family, one decoder layer at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat
from automodel_cli.models.checkpoint_io.target import Target, like_original, owner_of, tensors_of, unit_of
from automodel_cli.models.rng import seed_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def init_random(skeleton: PreTrainedModel, target: Target, seed: int) -> None:
    """Apply the initialization of the family, one decoder layer or outer module at a time, each with its own seed."""
    units: dict[str, list[str]] = {}
    for name in target.names:
        units.setdefault(unit_of(name) or name.rpartition(".")[0], []).append(name)
    for unit, names in units.items():
        values = _initialized(skeleton, unit, seed_for(seed, unit), recurse=unit_of(f"{unit}.") == unit)
        for name in names:
            if target.names[name] == name:
                value = values[name]
                target.fill(name, transformers_compat.local_part(target.tensors[name], value))
    assert not target.missing(), f"not initialised: {target.missing()[:3]}"


def init_buffers(skeleton: PreTrainedModel, target: Target) -> None:
    """Initialize buffers that checkpoints do not contain (rotary tables)."""
    for prefix in sorted({name.rpartition(".")[0] for name in target.non_persistent}):
        values = _initialized(skeleton, prefix, 0, recurse=False)
        for name in target.non_persistent & values.keys():
            target.fill(name, values[name])


@torch.no_grad()
def _initialized(skeleton: PreTrainedModel, unit: str, seed: int, *, recurse: bool) -> dict[str, Tensor]:
    """Return the tensors of a unit after the family's initialization on the CPU. The skeleton stays on meta."""
    root = skeleton.get_submodule(unit)
    modules = list(root.modules()) if recurse else [root]
    saved = [(m, dict(m._parameters), dict(m._buffers)) for m in modules]
    for module in modules:
        for store in tensors_of(module):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = like_original(tensor, _poisoned(torch.empty(tensor.shape, dtype=tensor.dtype)))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            transformers_compat.init_weights(skeleton, unit, recurse=recurse)
        named_tensors = [*root.named_parameters(recurse=recurse), *root.named_buffers(recurse=recurse)]
        values = {f"{unit}.{name}".lstrip("."): tensor.detach() for name, tensor in named_tensors}
        if any(map(_is_poisoned, values.values())):
            values = _set_from_above(skeleton, values, unit)
    finally:
        for module, params, buffers in saved:
            module._parameters.update(params)
            module._buffers.update(buffers)
    if unset := [name for name, tensor in values.items() if _is_poisoned(tensor)]:
        raise ConfigError(
            f"random weights are not supported because {type(skeleton).__name__} does not initialize {unset[0]}",
            code="not_supported_by_model",
            keys=("config",),
        )
    return values


def _set_from_above(skeleton: PreTrainedModel, values: dict[str, Tensor], unit: str) -> dict[str, Tensor]:
    """Return the values, including those that a model sets in submodules (the multipliers of Falcon-H1).

    A model may set them in every layer, so this uses a complete model.
    """
    unsharded = transformers_compat.uncut_copy(skeleton)
    for name, value in values.items():
        module, leaf = owner_of(unsharded, name)
        store = tensors_of(module)[0 if leaf in module._parameters else 1]
        store[leaf] = like_original(store[leaf], value)
    transformers_compat.init_from_above(unsharded, unit)
    return {name: module._parameters.get(leaf, module._buffers.get(leaf)).detach()  # type: ignore[union-attr]
            for name in values for module, leaf in [owner_of(unsharded, name)]}  # fmt: skip


def _poisoned(tensor: Tensor) -> Tensor:
    """Fill with a value that no initialization produces, to detect tensors that are not initialized."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())
