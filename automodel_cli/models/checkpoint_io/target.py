"""The tensors of a part that loading fills, and the skeleton that transformers loads in their place."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision import nf4
from automodel_cli.models.uneven_dtensor import is_uneven

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole_on_meta(part: ModelPart, config: ModelConfig) -> PreTrainedModel:
    """Build the transformers model with all layers on meta, to compare its names with checkpoint keys."""
    return transformers_compat.meta_model(
        copy.deepcopy(part.source_config),
        dtype=getattr(torch, config.dtype),
        trust_remote_code=config.trust_remote_code,
    )


def materialize(module: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Allocate all meta tensors. In contrast to `Module.to_empty`, tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in replaced:
                    empty = torch.empty_like(param, device=device)
                    replaced[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
                child._parameters[name] = replaced[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.empty_like(buffer, device=buffer_device)


class Target:
    """The tensors to fill, by hub name.

    Tied names share one entry under their first name. 4-bit weights are packed by their layers on `packed_device`.
    """

    def __init__(self, model: nn.Module, packed_device: torch.device):
        self.packed_device = packed_device
        self.joined: set[str] = set()
        self.packed = {f"{name}.weight": layer for name, layer in nf4.packed_layers(model)}
        self.names: dict[str, str] = {}  # name -> first name of the same tensor
        self.tensors: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        named_tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        named_tensors += [(name, layer.unloaded()) for name, layer in self.packed.items()]
        for name, tensor in named_tensors:
            canonical = first.setdefault(id(tensor), name)
            self.names[name] = canonical
            self.tensors[canonical] = tensor
        self.non_persistent = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules()
            for name in transformers_compat.non_persistent_buffers(module)
        }
        self.filled: dict[str, str] = {}  # first name -> the name it was filled from

    @torch.no_grad()
    def fill(self, name: str, value: Tensor) -> None:
        """Copy the local part of `name`. Among tied names, the first is used and the others must be equal."""
        canonical = self.names[name]
        if canonical in self.packed:
            self.packed[canonical].pack(value, self.packed_device)
            self.filled[canonical] = name
            return
        tensor = self.tensors[canonical]
        local, value = transformers_compat.local(tensor), transformers_compat.local(value)
        earlier = self.filled.setdefault(canonical, name)
        if earlier != name:
            if not torch.equal(local, value.to(local.device, local.dtype)):
                raise ConfigError(
                    f"{earlier} and {name} are tied by the config of the model but differ in the checkpoint",
                    code="weights_mismatch",
                    keys=("pretrained",),
                    fix="set tie_word_embeddings to false in the checkpoint's config.json",
                )
            return
        local.copy_(value)

    def missing(self) -> list[str]:
        return sorted(n for n in self.tensors if n not in self.filled and n not in self.non_persistent)


def skeleton_of(whole: PreTrainedModel, target: Target) -> PreTrainedModel:
    """Reduce the full meta model in place to the tensors of the target, with their shardings."""
    for prefix, module in whole.named_modules():
        for store in tensors_of(module):
            for name in [name for name, tensor in store.items() if tensor is not None]:
                full_name = f"{prefix}.{name}".lstrip(".")
                if full_name not in target.names:
                    del store[name]
                elif transformers_compat.is_dtensor(tensor := target.tensors[target.names[full_name]]) and not (
                    full_name in target.joined or needs_full_tensor(tensor)
                ):
                    store[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    return whole


def needs_full_tensor(tensor: Tensor) -> bool:
    """Return whether the full tensor must be read.

    The reader of transformers does not support uneven and empty shards (few heads on many ranks).
    """
    return is_uneven(tensor) or (
        transformers_compat.is_dtensor(tensor) and transformers_compat.local(tensor).numel() == 0
    )


def unit_of(key: str) -> str:
    """Return the decoder layer of a key ("model.layers.3"), or "" outside of layers."""
    match = re.match(r"(.*?\.\d+)\.", key)
    return match.group(1) if match else ""


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def to_meta(module: nn.Module, leaf: str) -> None:
    store = tensors_of(module)[0 if leaf in module._parameters else 1]
    store[leaf] = like_original(store[leaf], torch.empty_like(store[leaf], device="meta"))


def tensors_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter and buffer dictionaries of the module, for in-place replacement."""
    return [module._parameters, module._buffers]


def like_original(original: Tensor, tensor: Tensor) -> Tensor:
    """Return a parameter if the original is one."""
    return nn.Parameter(tensor, original.requires_grad) if isinstance(original, nn.Parameter) else tensor
