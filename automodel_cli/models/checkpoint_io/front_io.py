"""Weights of the front end of a vision-language model: load, random initialization, and names for the export.

Every tensor of the checkpoint outside the text model has one parameter of the front end, under a name that transformers
renames. Names and layout of the export are therefore those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import conversion_compat, transformers_compat
from automodel_cli.models.checkpoint_io.initialization import init_buffers, init_random
from automodel_cli.models.checkpoint_io.target import Target, skeleton_of, whole_on_meta
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import composite_text, dequantize, passthrough_tensors, source
from automodel_cli.models.hub.multimodal_backbone import BackboneMapping
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision import nf4
from automodel_cli.models.vision.front import composite_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fill_front(part: ModelPart, config: ModelConfig, *, buffer_device: torch.device, seed: int) -> None:
    """Fill the front end of a vision-language model, which only the first pipeline stage has.

    Call it after `load_weights`, which allocates the memory. Raises ConfigError if the checkpoint lacks a tensor.
    """
    if config.vision is None:
        return
    whole = composite_on_meta(source.composite_config(config), getattr(torch, config.dtype))
    front = part.front
    if config.config is not None:
        part.within = _names_in_memory(whole_on_meta(part, config), whole)
    if front is None:
        names = whole.state_dict().keys()
        current = list(conversion_compat.current_keys(whole, part.unclaimed))
        part.unclaimed = tuple(key for key, name in current if name not in names)
        lora.init_adapters(nn.Module(), config.lora, seed)  # Decompositions of weights are collective over all stages.
        return
    with lora.bare(front.composite):
        target = Target(front.composite, buffer_device)
    if config.config is not None:
        init_random(skeleton_of(whole, target), target, seed)
        part.front_keys = {name: name for name in target.tensors if name not in target.non_persistent}
    else:
        _fill_from_checkpoint(part, config, whole, target)
    lora.init_adapters(front.composite, config.lora, seed)
    if config.lora is not None and config.lora.pretrained is not None:
        lora.fill_pretrained(front.composite, config.lora.pretrained)


def _fill_from_checkpoint(part: ModelPart, config: ModelConfig, whole: PreTrainedModel, target: Target) -> None:
    """Fill the front end from the tensors that the text model does not claim. `whole` becomes the skeleton."""
    weights = source.weights(config)
    tensors = dequantize.dequantized(passthrough_tensors.lazy_tensors(weights.files), weights.quantization)
    keys = {name: key for key, name in conversion_compat.current_keys(whole, part.unclaimed)}
    found = {name: keys[name] for name in target.names if name in keys}
    for name, key in found.items():
        target.fill(name, transformers_compat.local_part(target.tensors[target.names[name]], tensors[key][...]))
    if missing := target.missing():
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} tensors outside the text model, or stores them in another layout: "
            f"{', '.join(missing[:3])}",
            code="weights_mismatch",
            keys=("pretrained",),
            fix="model.pretrained=<a checkpoint of the same architecture>",
        )
    init_buffers(skeleton_of(whole, target), target)
    part.front_keys = found
    claimed = set(found.values())
    part.unclaimed = tuple(key for key in part.unclaimed if key not in claimed)


def _names_in_memory(model: PreTrainedModel, whole: PreTrainedModel) -> BackboneMapping:
    """Return the names of the text model `model` inside the composite, for an export of random weights."""
    head, whole_head = (_name_of_head(holder) for holder in (model, whole))
    modules = {model.base_model_prefix: str(composite_text.text_module(whole))}
    modules |= {} if head is None else {head: str(whole_head)}
    keys = {}
    for name in model.state_dict():
        for text_module, full_module in modules.items():
            if name.startswith(f"{text_module}."):
                keys[full_module + name.removeprefix(text_module)] = name
    return BackboneMapping(keys, modules)


def _name_of_head(model: PreTrainedModel) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def front_weights(
    part: ModelPart, dtype: torch.dtype, device: torch.device | str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the front end under the keys of the checkpoint. Adapters are merged. Collective for sharded
    tensors."""
    if part.front is None:
        return
    composite: PreTrainedModel = part.front.composite
    updates = {f"{name}.weight": layer for name, layer in lora.wrappers(composite)}
    with lora.bare(composite):
        state = {**dict(composite.named_parameters()), **dict(composite.named_buffers())}
        packed = {f"{name}.weight": layer for name, layer in nf4.packed_layers(composite)}
    keep_fp32 = transformers_compat.fp32_names(composite, dtype)
    for name, key in part.front_keys.items():
        if name in state or name in packed:
            full = packed[name].dequantized() if name in packed else transformers_compat.full_tensor(state[name])
            target_dtype = torch.float32 if keep_fp32(name) else dtype
            if name in updates:
                full = lora_merge.rounded(name, lora_merge.merged_weight(full, updates[name]), target_dtype)
            elif full.is_floating_point():
                full = full.to(target_dtype)
            yield key, full.to(device) if device is not None else full
