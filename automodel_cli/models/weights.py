"""One ordered stream of full, hub-named weights, whatever the sharding: for export, rollout and weight sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.models import compat, lora
from automodel_cli.models.load import unit_of
from automodel_cli.models.part import ModelPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bucket = list[tuple[str, Tensor]]


def iter_hf_weights(
    parts: Sequence[ModelPart],
    *,
    bucket_bytes: int = 2**30,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    hub_names: bool = True,
) -> Iterator[Bucket]:
    """Buckets of `(hub name, full tensor)`: persistent buffers included, tied weights once, adapters merged in.

    Fused parameters are split back to the hub's keys (one per expert, where the hub has them so). `dtype` None is the
    checkpoint's own; what the family keeps in fp32 stays fp32. Tensors are detached, and copies unless dtype and device
    already fit. A bucket holds at least one tensor and closes once it reaches `bucket_bytes`.
    Collective over all ranks that hold shards, in the same order everywhere: every rank must exhaust the iterator.
    """
    bucket: Bucket = []
    size = 0
    for part in parts:
        for name, tensor in _named_full_weights(part, dtype or part.hub_dtype, device, hub_names):
            bucket.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
            if size >= bucket_bytes:
                yield bucket
                bucket, size = [], 0
    if bucket:
        yield bucket


@torch.no_grad()
def _named_full_weights(
    part: ModelPart, dtype: torch.dtype, device: torch.device | str | None, hub_names: bool
) -> Iterator[tuple[str, Tensor]]:
    model = part.model
    updates = {f"{name}.weight": layer for name, layer in lora.wrappers(model)}
    keep_fp32 = compat.fp32_names(model, dtype)
    with lora.bare(model):
        units: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _persistent(model):
            units.setdefault(unit_of(name), {})[name] = tensor
    for unit in units.values():
        state = {}
        for name, tensor in unit.items():
            full = compat.gathered(tensor)
            if name in updates:
                full = (full.float() + lora.delta(updates[name])).to(full.dtype)
            if full.is_floating_point():
                full = full.to(torch.float32 if keep_fp32(name) else dtype)
            state[name] = full.to(device) if device is not None else full
        if hub_names:
            with lora.bare(model):
                state = compat.revert_conversion(model, state)
        yield from state.items()


def _persistent(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers that checkpoints hold, each once, in the model's order."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        non_persistent = set(compat.non_persistent_buffers(module))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent:
                yield f"{prefix}.{name}".lstrip("."), buffer
