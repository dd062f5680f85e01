"""One ordered stream of full, hub-named weights, whatever the sharding: for export, rollout and weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.models import lora, nf4, transformers_compat
from automodel_cli.models.checkpoint_io.load import unit_of
from automodel_cli.models.model_part import ModelPart

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
    pp_group: dist.ProcessGroup | None = None,
    multi_token: bool = False,
    keep_mean: bool = False,
) -> Iterator[Bucket]:
    """Buckets of `(hub name, full tensor)`: persistent buffers included, tied weights once, adapters merged in. A tied
    head with an adapter comes besides, under its own name: merged it is another matrix (`ModelPart.unties_head`).

    Fused parameters are split back to the hub's keys (one per expert, where the hub has them so). `dtype` None is the
    checkpoint's own; what the family keeps in fp32 stays fp32. Tensors are detached, and copies unless dtype and device
    already fit. A bucket holds at least one tensor and closes once it reaches `bucket_bytes`.
    `keep_mean`: trainable float32 parameters that get 16 bits are rounded at random (`lora.rounded`). Engines get the
    nearest values, which are those that the trainer computes with.
    `multi_token`: layers for multi-token prediction too, under their hub names, with the copies of shared tables that
    the checkpoint had. `pp_group`: the ranks of a pipeline, whose stages follow each other in the stream; every rank
    gets all of them.
    Collective over all ranks that hold shards, in the same order everywhere: every rank must exhaust the iterator.
    """
    mine = (
        item
        for part in parts
        for item in _named_full_weights(part.model, dtype or part.hub_dtype, device, hub_names, keep_mean)
    )
    if multi_token:
        mine = (item for part in parts for item in _with_depths(part, dtype or part.hub_dtype, device, keep_mean))
    yield from bucketed(mine if pp_group is None else over_stages(mine, pp_group, parts[0], device), bucket_bytes)


def bucketed(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """The same tensors in buckets: at least one in each, which closes once it reaches `bucket_bytes`."""
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        bucket.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def over_stages(
    mine: Iterator[tuple[str, Tensor]],
    group: dist.ProcessGroup,
    part: ModelPart,
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    """The streams of all ranks of a pipeline, one rank after the other, on each of them; a tied table comes once.

    What is sent is announced first (name, shape, dtype), so that ranks without a tensor can receive it.
    """
    seen: set[str] = set()
    compute_device = transformers_compat.local(next(part.parameters())).device
    for owner in range(dist.get_world_size(group)):
        source = dist.get_global_rank(group, owner)
        is_mine = dist.get_rank(group) == owner
        while True:
            item = next(mine, None) if is_mine else None
            about: list[tuple[str, torch.Size, torch.dtype] | None] = [None]
            if item is not None:
                about = [(item[0], item[1].shape, item[1].dtype)]
            dist.broadcast_object_list(about, src=source, group=group, device=torch.device("cpu"))
            if about[0] is None:
                break
            name, shape, dtype = about[0]
            if item is not None:
                tensor = item[1].to(compute_device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=compute_device)
            dist.broadcast(tensor, src=source, group=group)
            if name not in seen:
                seen.add(name)
                yield name, tensor.to(device) if device is not None else tensor


def _with_depths(
    part: ModelPart, dtype: torch.dtype, device: torch.device | str | None, keep_mean: bool
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a part, depths of multi-token prediction and stored copies of tables included."""
    names = part.depth_names
    copies = {} if names is None else names.copies
    for name, tensor in _named_full_weights(part.model, dtype, device, True, keep_mean):
        yield name, tensor
        yield from ((key, tensor.clone()) for key, table in copies.items() if table == name)
    if names is not None and part.multi_token is not None:
        for depth, own in zip(part.multi_token, names.depths, strict=True):
            model: Any = depth.model
            named = _named_full_weights(model, dtype, device, True, keep_mean)
            yield from ((own.key(name), tensor) for name, tensor in named)


@torch.no_grad()
def _named_full_weights(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device | str | None, hub_names: bool, keep_mean: bool
) -> Iterator[tuple[str, Tensor]]:
    updates = {f"{name}.weight": layer for name, layer in lora.wrappers(model)}
    of_its_own = {f"{name}.weight": updates[f"{name}.weight"].get_base_layer().weight for name in lora.sharing(model)}
    keep_fp32 = transformers_compat.fp32_names(model, dtype)
    with lora.bare(model):
        units: dict[str, dict[str, Tensor | nf4.NF4Linear]] = {}
        for name, tensor in (*_persistent(model), *of_its_own.items()):
            units.setdefault(unit_of(name), {})[name] = tensor
        for name, packed in nf4.packed_layers(model):
            units.setdefault(unit_of(name), {})[f"{name}.weight"] = packed
    for unit in units.values():
        state = {}
        for name, held in unit.items():
            full = held.dequantised() if isinstance(held, nf4.NF4Linear) else transformers_compat.full_tensor(held)
            wanted = torch.float32 if keep_fp32(name) else dtype
            if name in updates:
                full = lora.rounded(name, lora.merged_weight(full, updates[name]), wanted)
            elif keep_mean and isinstance(held, nn.Parameter) and held.requires_grad and full.dtype == torch.float32:
                full = lora.rounded(name, full, wanted)
            elif full.is_floating_point():
                full = full.to(wanted)
            state[name] = full.to(device) if device is not None else full
        if hub_names:
            with lora.bare(model):
                state = transformers_compat.revert_conversion(model, state)
        yield from state.items()


def _persistent(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers that checkpoints hold, each once, in the model's order."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        non_persistent = set(transformers_compat.non_persistent_buffers(module))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent:
                yield f"{prefix}.{name}".lstrip("."), buffer
