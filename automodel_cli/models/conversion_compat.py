"""Private names of transformers that convert keys of checkpoints to parameters in memory. Supports 5.17 to 5.24.

Relies on the conversion mapping between hub keys and in-memory (fused) parameters, and on the converter that reads
lazily into DTensors. Covered by tests/unit/models/checkpoint_io/test_load.py and tests/dist/test_models_sharded.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from automodel_cli.models.transformers_compat import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform


def conversion_mapping(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversion of hub keys to this model's parameters. Use the complete model, before it is split."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping: list[WeightTransform] = get_model_conversion_mapping(model)
    return mapping


def share_converters(whole: type[PreTrainedModel], model_type: str, part: type[PreTrainedModel]) -> None:
    """Fuse checkpoints of the class `part` like those of `whole`, which contains it. Names are not shared."""
    from transformers import conversion_mapping as mappings
    from transformers.core_model_loading import WeightConverter

    mapping = mappings.get_checkpoint_conversion_mapping(whole.__name__)
    mapping = mapping or mappings.get_checkpoint_conversion_mapping(model_type) or []
    converters: list[Any] = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    if converters:
        mappings.register_checkpoint_conversion_mapping(part.__name__, converters, overwrite=True)


@dataclass(frozen=True)
class Converted:
    """Result of `convert_into`, by parameter name."""

    loaded: frozenset[str]
    mismatched: tuple[str, ...]


def convert_into(
    model: PreTrainedModel, tensors: Mapping[str, object], mapping: list[WeightTransform], dtype: torch.dtype
) -> Converted:
    """Read `tensors` (hub key -> lazy safetensors slice or tensor) into `model`, replacing its parameters.

    A parameter that is a DTensor on the meta device receives only this rank's part, and only those bytes are read. Each
    parameter keeps its dtype.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    names = set(model.state_dict())
    config = LoadStateDictConfig(
        device_map={"": "cpu"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=cast(list[Any], mapping),
    )
    with quiet():
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    if info.conversion_errors:
        raise RuntimeError(f"the library could not convert {info.conversion_errors}")
    mismatched = tuple(f"{name}: file {tuple(got)}, model {tuple(want)}" for name, got, want in info.mismatched_keys)
    missing = set(info.missing_keys) | {name for name, _, _ in info.mismatched_keys}
    return Converted(frozenset(names - missing), mismatched)


def unclaimed_keys(model: PreTrainedModel, mapping: list[WeightTransform], keys: Iterable[str]) -> list[str]:
    """Return the checkpoint keys without a counterpart in the complete `model`, as transformers' loader decides it."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = copy.deepcopy(mapping)  # mappings record the keys that they matched
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, names = model.base_model_prefix, model.state_dict()

    def is_claimed(key: str) -> bool:
        renamed, _ = rename_source_key(key, renamings, converters, prefix, names)
        plain, _ = rename_source_key(key, [], [], prefix, names) if key in names else (renamed, None)
        return renamed in names or plain in names

    return [key for key in keys if not is_claimed(key)]


def settled_transposes(
    mapping: list[WeightTransform], model: nn.Module, tensors: Mapping[str, Any]
) -> list[WeightTransform]:
    """Decide now which conversions transpose. The library compares a shard of a tensor with the full parameter.

    `model`: the full model. `tensors`: hub key -> lazy safetensors slice or tensor.
    """
    shapes = {name: param.shape for name, param in model.named_parameters()}

    def is_stored_as_is(entry: WeightTransform) -> bool:
        names = [n for n in tensors if n in shapes and any(s in n for s in entry.source_patterns)]
        stored = [(tensors[n].get_shape() if hasattr(tensors[n], "get_shape") else tensors[n].shape) for n in names]
        return any(tuple(shape) == tuple(shapes[name]) for name, shape in zip(names, stored, strict=True))

    settled = []
    for entry in mapping:
        checked = [step for step in getattr(entry, "operations", ()) if getattr(step, "check_dims", False)]
        if checked:
            if is_stored_as_is(entry):
                continue
            entry = copy.deepcopy(entry)
            for step in getattr(entry, "operations", ()):
                step.check_dims = False
        settled.append(entry)
    return settled


def joined_names(mapping: list[WeightTransform], names: Iterable[str]) -> set[str]:
    """Parameters that a conversion joins or cuts along dim 0: several tensors of the checkpoint one after another (the
    convolutions of KDA), or a part of one (queries, keys and values of sarvam_moe). The library's reader takes a shard
    of each tensor, which is not a shard of the parameter."""
    parts = tuple(
        f".{pattern.strip('.')}."
        for entry in mapping
        if any(
            type(step).__name__ in ("Concatenate", "Split") and step.dim == 0
            for step in getattr(entry, "operations", ())
        )
        for pattern in entry.target_patterns
    )
    return {name for name in names if any(part in f".{name}." for part in parts)}


def current_keys(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Map each checkpoint key to the key of the current transformers version: renamed, not fused."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [entry for entry in copy.deepcopy(conversion_mapping(model)) if isinstance(entry, WeightRenaming)]
    names = model.state_dict()
    for key in keys:
        yield key, rename_source_key(key, renamings, [], model.base_model_prefix, names)[0]


def revert_conversion(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert in-memory names and layouts to the hub's. `state` must hold complete conversion groups (a decoder
    layer)."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted
