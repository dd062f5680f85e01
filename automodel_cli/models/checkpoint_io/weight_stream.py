"""One ordered stream of full weights with hub names, for any sharding. Used by export, rollouts and weight updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel.low_rank import WEIGHTS
from automodel_cli.distributed.qat.linear import QATLinear, quantized_experts, quantized_layers
from automodel_cli.distributed.qat.settings import FakeQuantization, LowRank
from automodel_cli.distributed.tensors import device_of
from automodel_cli.models import conversion_compat, transformers_compat
from automodel_cli.models.checkpoint_io.target import unit_of
from automodel_cli.models.hub.compressed_tensors import compressed
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import experts as expert_lora
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision import nf4

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
    quantized: bool = False,
) -> Iterator[Bucket]:
    """Yield buckets of `(hub name, full tensor)`. Collective; every rank must exhaust the iterator.

    Contains persistent buffers. Tied weights occur once. Adapters are merged. A tied head with an adapter also occurs
    under its own name, because its merged weight differs (`ModelPart.unties_head`). Fused parameters are split to hub
    keys (for example one per expert). Tensors are detached, and copies unless dtype and device match.

    Args:
        bucket_bytes: a bucket is complete when it reaches this size [bytes].
        dtype: None: dtype of the checkpoint. Tensors that the family keeps in fp32 stay fp32.
        pp_group: pipeline ranks, whose stages follow each other in the stream. Every rank yields all of them.
        multi_token: include multi-token prediction layers and the checkpoint's copies of shared tables.
        keep_mean: round trainable fp32 parameters to 16 bits stochastically (`lora_merge.rounded`). Engines use nearest
            rounding, which the trainer computes with.
        quantized: yield the weights of fake-quantized layers as the tensors of a quantized checkpoint.
    """
    local_stream = (
        item
        for part in parts
        for item in _named_full_weights(part.model, dtype or part.hub_dtype, device, hub_names, keep_mean, quantized)
    )
    if multi_token:
        local_stream = (
            item for part in parts for item in _with_depths(part, dtype or part.hub_dtype, device, keep_mean, quantized)
        )
    yield from bucketed(
        local_stream if pp_group is None else over_stages(local_stream, pp_group, parts[0], device), bucket_bytes
    )


def bucketed(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Group tensors into buckets of at least one tensor. A bucket is complete when it reaches `bucket_bytes`."""
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
    local_stream: Iterator[tuple[str, Tensor]],
    group: dist.ProcessGroup,
    part: ModelPart,
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the streams of all pipeline ranks in order, on each of them. A tied table occurs once.

    Name, shape and dtype are sent first, so that other ranks can receive the tensor.
    """
    seen: set[str] = set()
    compute_device = device_of([part])
    # Example: 2 stages. Rank 0 broadcasts (name, shape, dtype) and the tensor, for each tensor, then None. Then rank 1
    # does. All ranks yield the same names in the same order.
    for owner in range(dist.get_world_size(group)):
        source = dist.get_global_rank(group, owner)
        is_owner = dist.get_rank(group) == owner
        while True:
            item = next(local_stream, None) if is_owner else None
            # None ends the stream of this owner.
            header: list[tuple[str, torch.Size, torch.dtype] | None] = [None]
            if item is not None:
                header = [(item[0], item[1].shape, item[1].dtype)]
            dist.broadcast_object_list(header, src=source, group=group, device=torch.device("cpu"))
            if header[0] is None:
                break
            name, shape, dtype = header[0]
            if item is not None:
                tensor = item[1].to(compute_device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=compute_device)
            sent = tensor.view(torch.uint8) if dtype == torch.float8_e4m3fn else tensor  # gloo does not know float8
            dist.broadcast(sent, src=source, group=group)
            if name not in seen:
                seen.add(name)
                yield name, tensor.to(device) if device is not None else tensor


def _with_depths(
    part: ModelPart, dtype: torch.dtype, device: torch.device | str | None, keep_mean: bool, quantized: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a part with multi-token prediction layers and stored copies of tables."""
    names = part.depth_names
    copies = {} if names is None else names.copies
    for name, tensor in _named_full_weights(part.model, dtype, device, True, keep_mean, quantized):
        yield name, tensor
        yield from ((key, tensor.clone()) for key, table in copies.items() if table == name)
    if names is not None and part.multi_token is not None:
        for depth, own in zip(part.multi_token, names.depths, strict=True):
            model = cast("PreTrainedModel", depth.model)
            named = _named_full_weights(model, dtype, device, True, keep_mean)
            yield from ((own.key(name), tensor) for name, tensor in named)


@torch.no_grad()
def _named_full_weights(
    model: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str | None,
    hub_names: bool,
    keep_mean: bool,
    quantized: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    updates = {f"{name}.weight": layer for name, layer in lora.wrappers(model)}
    of_experts = expert_lora.weights(model)
    untied_heads = lora.untied_weights(model)
    keep_fp32 = transformers_compat.fp32_names(model, dtype)
    with lora.bare(model):
        units: dict[str, dict[str, Tensor | nf4.NF4Linear]] = {}
        for name, tensor in (*_persistent(model), *untied_heads.items()):
            units.setdefault(unit_of(name), {})[name] = tensor
        for name, packed in nf4.packed_layers(model):
            units.setdefault(unit_of(name), {})[f"{name}.weight"] = packed
        of_layers = {f"{name}.weight": layer for name, layer in quantized_layers(model)} if quantized else {}
        of_weights = {name: layer.qat for name, layer in of_layers.items()} | _of_experts(model, quantized)
    # One unit (for example a decoder layer) at a time: the memory is that of one unsharded layer.
    for unit in units.values():
        state, rounded = {}, {}
        for name, stored in unit.items():
            full = (
                stored.dequantized() if isinstance(stored, nf4.NF4Linear) else transformers_compat.full_tensor(stored)
            )
            target_dtype = torch.float32 if keep_fp32(name) else dtype
            if name in of_weights:
                update = LowRank(*lora_merge.factors(updates[name])) if name in updates else None
                rounded[name] = of_weights[name].rounded(full, update)
                continue
            if name in updates:
                # (out, in) weight + scale * B @ A, in fp32, then rounded once.
                full = lora_merge.rounded(name, lora_merge.merged_weight(full, updates[name]), target_dtype)
            elif name in of_experts:
                full = lora_merge.rounded(name, full.float() + expert_lora.delta(*of_experts[name]), target_dtype)
            elif (
                keep_mean and isinstance(stored, nn.Parameter) and stored.requires_grad and full.dtype == torch.float32
            ):
                full = lora_merge.rounded(name, full, target_dtype)
            elif full.is_floating_point():
                full = full.to(target_dtype)
            state[name] = full.to(device) if device is not None else full
        if hub_names:
            with lora.bare(model):
                state = conversion_compat.revert_conversion(model, state)
        yield from state.items()
        yield from _compressed(model, rounded, of_weights, of_layers, dtype, device)


def _of_experts(model: PreTrainedModel, quantized: bool) -> dict[str, FakeQuantization]:
    """Return the quantization of the fused weights of experts."""
    modules = quantized_experts(model) if quantized else ()
    return {f"{name}.{weight}": experts.qat for name, experts in modules for weight in WEIGHTS}


def _compressed(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    quantizations: dict[str, FakeQuantization],
    layers: dict[str, QATLinear],
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the quantized tensors of a unit, whose full weights are given in the dtype in which they are quantized."""
    largest = {name: full.float().abs().amax() for name, full in weights.items()}
    names = {id(layers[name]): name for name in weights if name in layers}
    for name, full in weights.items():
        sharing = [names[id(layer)] for layer in layers[name].shares] if name in layers else [name]
        amax = torch.stack([largest[other] for other in sharing]).amax()
        for hub_name, tensor in conversion_compat.revert_conversion(model, {name: full}).items():
            for key, stored in compressed(hub_name, tensor, quantizations[name], amax, dtype):
                yield key, stored.to(device) if device is not None else stored


def _persistent(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then persistent buffers, each once, in model order."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        non_persistent = set(transformers_compat.non_persistent_buffers(module))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent:
                yield f"{prefix}.{name}".lstrip("."), buffer
