"""Weight loading into a sharded part. Each rank reads only its own bytes.

The loader of transformers does not see the part. It loads a *skeleton*: the same class on the meta device, with the
shardings and parameters of the part. The skeleton is loaded one decoder layer at a time. Each loaded tensor is copied
into the existing parameters of the part and freed. Adapters, wrappers and parameter identity therefore do not matter,
and peak memory is one layer above the part itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.models import lora, new_tokens, nf4, transformers_compat
from automodel_cli.models.checkpoint_io import stored_head
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import dequantize, multimodal_backbone, passthrough_tensors, source
from automodel_cli.models.hub.lazy_tensor import StoredTensor
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp import layers as mtp_layers
from automodel_cli.models.rng import seed_for
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead
from automodel_cli.models.uneven_dtensor import is_uneven

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadReport:
    """Result of loading.

    num_bytes_read: checkpoint bytes read by this rank.
    unclaimed: checkpoint keys without a counterpart in the full model.
    within: location of the model in a multimodal checkpoint.
    """

    num_bytes_read: int = 0
    unclaimed: tuple[str, ...] = ()
    within: multimodal_backbone.BackboneMapping | None = None


def load_weights(
    part: ModelPart,
    config: ModelConfig,
    *,
    device: torch.device | str,
    seed: int,
    buffer_device: torch.device | None = None,
    score_head: ScoreHead | EmbeddingHead | None = None,
) -> LoadReport:
    """Allocate meta tensors on `device` and fill all tensors.

    Works for plain parameters and DTensor shards. Ties are preserved. Random weights depend only on `seed` and the
    parameter's name, so that every layout starts with equal weights. Allocation replaces parameters, so build the
    optimizer afterwards. Raises ConfigError for missing or mismatched weights.

    Args:
        buffer_device: device of buffers and 4-bit weights. None: `device`.
        score_head: scores or embeddings that replace the log-probs. Then a checkpoint may lack the LM head, which is
            set to 0 because nothing reads it, and scores of a classifier continue from its score layer.
    """
    materialize(part, torch.device(device), buffer_device or torch.device(device))
    with lora.bare(part.model):
        target = Target(part.model, buffer_device or torch.device(device))
        unsharded = whole_on_meta(part, config)
        if config.config is not None:
            report = init_random(skeleton_of(unsharded, target), target, seed)
            _init_depths(part, config, seed, target.packed_device)
        else:
            weights = source.weights(config)
            if weights.gguf is not None:
                report = _load_gguf(part, config, weights.gguf, target)
                init_buffers(skeleton_of(unsharded, target), target)
            else:
                checkpoint = _Checkpoint(weights)
                optional = frozenset() if score_head is None else stored_head.head_names(unsharded)
                report = _load_safetensors(unsharded, target, checkpoint, config, optional)
                init_buffers(unsharded, target)
                report = _load_depths(part, config, checkpoint, report, target.packed_device)
    part.unclaimed, part.within = report.unclaimed, report.within
    if part.unties_head and report.within is not None:
        raise ConfigError(
            "lora.target_modules must not match the head, because it is tied to the embedding. The export of a "
            "multimodal model keeps its config and therefore the tie",
            code="not_supported_by_model",
            keys=("lora.target_modules",),
            fix="model.lora.target_modules=all-linear",
        )
    lora.init_adapters(part.model, config.lora, seed)
    if config.lora is not None and config.lora.pretrained is not None:
        lora.fill_pretrained(part, config.lora.pretrained)
    stored_head.fill_scores(part, config, score_head)
    return report


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
        for store in _stores(module):
            for name in [name for name, tensor in store.items() if tensor is not None]:
                full_name = f"{prefix}.{name}".lstrip(".")
                if full_name not in target.names:
                    del store[name]
                elif transformers_compat.is_dtensor(tensor := target.tensors[target.names[full_name]]) and not (
                    full_name in target.joined or _read_whole(tensor)
                ):
                    store[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    return whole


def _read_whole(tensor: Tensor) -> bool:
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


class _CountedSlice:
    """Lazy safetensors slice that records the bytes read in a list, because transformers reads with several threads."""

    def __init__(self, lazy: StoredTensor, sizes: list[int]):
        self._lazy, self._sizes = lazy, sizes

    def __getitem__(self, index: object) -> Tensor:
        tensor = self._lazy[index]
        self._sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    def get_shape(self) -> list[int]:
        return self._lazy.get_shape()

    def get_dtype(self) -> str:
        return self._lazy.get_dtype()


class _Checkpoint:
    """Lazy tensors of safetensors files, with a count of the bytes read."""

    def __init__(self, weights: source.Weights):
        self._sizes: list[int] = []
        stored = {
            k: _CountedSlice(lazy, self._sizes) for k, lazy in passthrough_tensors.lazy_tensors(weights.files).items()
        }
        self.tensors = dequantize.dequantized(stored, weights.quantization)

    @property
    def num_bytes_read(self) -> int:
        return sum(self._sizes)


def _load_safetensors(
    whole: PreTrainedModel,
    target: Target,
    checkpoint: _Checkpoint,
    config: ModelConfig,
    optional: frozenset[str] = frozenset(),
) -> LoadReport:
    """Load safetensors files. `whole` becomes the skeleton. `optional` parameters become 0 if they are not there."""
    tensors, repository = checkpoint.tensors, source.composite_config(config)
    within = None
    if multimodal_backbone.text_config(repository) is not repository:
        within = multimodal_backbone.text_backbone(repository, whole, tensors)
    known_as = {key: key for key in tensors} if within is None else within.keys
    mapping = transformers_compat.conversion_mapping(whole)
    no_place = set(transformers_compat.unclaimed_keys(whole, mapping, known_as.values()))
    unclaimed = [key for key in tensors if key not in known_as or known_as[key] in no_place]
    tensors = new_tokens.grown(tensors, config, repository, unclaimed)
    _fill_from({name: tensors[key] for key, name in known_as.items()}, whole, target, mapping, optional)
    return LoadReport(checkpoint.num_bytes_read, tuple(unclaimed), within)


def _fill_from(
    named_tensors: Mapping[str, StoredTensor],
    whole: PreTrainedModel,
    target: Target,
    mapping: list[Any],
    optional: frozenset[str] = frozenset(),
) -> None:
    """Load lazy tensors by hub name into the target, one layer after another. `whole` becomes the skeleton."""
    units: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in named_tensors.items():
        units.setdefault(unit_of(name), {})[name] = tensor
    target.joined = transformers_compat.joined_names(mapping, target.names)
    mapping = transformers_compat.settled_transposes(mapping, whole, named_tensors)
    skeleton = skeleton_of(whole, target)
    for plain in units.values():
        done = transformers_compat.convert_into(skeleton, plain, mapping, skeleton.dtype)
        if done.mismatched:
            raise ConfigError(
                f"the checkpoint does not match the model: {'; '.join(done.mismatched[:3])}",
                code="weights_mismatch",
                keys=("pretrained",),
            )
        for name in sorted(done.loaded):
            module, leaf = _owner(skeleton, name)
            value = module._parameters.get(leaf, module._buffers.get(leaf))
            assert value is not None
            if not value.is_meta:
                param = target.tensors[target.names[name]]
                cut = name in target.joined or _read_whole(param)
                target.fill(name, transformers_compat.local_part(param, value.detach()) if cut else value.detach())
                _to_meta(module, leaf)
    for name in optional & set(target.missing()):
        with torch.no_grad():
            target.filled[name] = name
            target.tensors[name].zero_()
    if missing := target.missing():
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} tensors of the model: {', '.join(missing[:3])}",
            code="weights_mismatch",
            keys=("pretrained",),
            fix="model.pretrained=<a checkpoint of the same architecture>",
        )


def _load_depths(
    part: ModelPart, config: ModelConfig, checkpoint: _Checkpoint, report: LoadReport, buffer_device: torch.device
) -> LoadReport:
    """Load the multi-token prediction layers and remove their keys from the unclaimed ones.

    Pipeline stages without these layers only update the report.
    """
    names, tensors = part.depth_names, checkpoint.tensors
    if names is None:
        return report
    claimed = set(names.copies)
    for i, known_as in enumerate(names.own_names(report.unclaimed)):
        unsharded = whole_on_meta(part, config)
        mtp_layers.cut_to_depth(unsharded)
        mapping = transformers_compat.conversion_mapping(unsharded)
        no_place = set(transformers_compat.unclaimed_keys(unsharded, mapping, known_as.values()))
        depth_keys = {key: name for key, name in known_as.items() if name not in no_place}
        claimed |= depth_keys.keys()
        if part.multi_token is not None:
            target = Target(cast(nn.Module, part.multi_token[i].model), buffer_device)
            _fill_from({name: tensors[key] for key, name in depth_keys.items()}, unsharded, target, mapping)
            init_buffers(unsharded, target)
    if part.multi_token is not None:
        _compare_copies(names.copies, checkpoint, report)
    unclaimed = tuple(key for key in report.unclaimed if key not in claimed)
    return replace(report, num_bytes_read=checkpoint.num_bytes_read, unclaimed=unclaimed)


def _init_depths(part: ModelPart, config: ModelConfig, seed: int, buffer_device: torch.device) -> None:
    """Initialize the multi-token prediction layers randomly."""
    for i, depth in enumerate(part.multi_token or ()):
        unsharded = whole_on_meta(part, config)
        mtp_layers.cut_to_depth(unsharded)
        target = Target(cast(nn.Module, depth.model), buffer_device)
        init_random(skeleton_of(unsharded, target), target, seed_for(seed, f"multi_token.{i}"))


def _compare_copies(copies: dict[str, str], checkpoint: _Checkpoint, report: LoadReport) -> None:
    """Warn if the checkpoint contains a copy of a table that differs from the table used in its place.

    Each rank compares a part of the rows.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    hub_keys = {} if report.within is None else {name: key for key, name in report.within.keys.items()}
    for key, table in copies.items():
        copied, own = (checkpoint.tensors[k] for k in (key, hub_keys.get(table, table)))
        count = copied.get_shape()[0]
        rows = slice(count * rank // world, count * (rank + 1) // world)
        if not torch.equal(copied[rows], own[rows]):
            warn("weights_mismatch", "%s differs from %s, which is used and exported in its place", key, table)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _to_meta(module: nn.Module, leaf: str) -> None:
    store = _stores(module)[0 if leaf in module._parameters else 1]
    store[leaf] = _like(store[leaf], torch.empty_like(store[leaf], device="meta"))


def _stores(module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter and buffer dictionaries of the module, for in-place replacement."""
    return [module._parameters, module._buffers]


def _like(original: Tensor, tensor: Tensor) -> Tensor:
    """Return a parameter if the original is one."""
    return nn.Parameter(tensor, original.requires_grad) if isinstance(original, nn.Parameter) else tensor


def _load_gguf(part: ModelPart, config: ModelConfig, gguf: tuple[str, str], target: Target) -> LoadReport:
    """Load with the dequantizing loader of transformers: the full model on every rank, then keep the local part."""
    from transformers import AutoModelForCausalLM

    folder, file = gguf
    dtype = getattr(torch, config.dtype)
    with transformers_compat.quiet():
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=dtype, config=copy.deepcopy(part.source_config)
        )
    state = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    for name, canonical in target.names.items():
        if name == canonical and name in state and name not in target.non_persistent:
            target.fill(name, transformers_compat.local_part(target.tensors[name], state[name].detach()))
    if missing := target.missing():
        raise ConfigError(
            f"gguf_file={file!r} lacks {len(missing)} tensors of the model: {', '.join(missing[:3])}",
            code="weights_mismatch",
            keys=("gguf_file",),
        )
    return LoadReport((Path(folder) / file).stat().st_size)


def init_random(skeleton: PreTrainedModel, target: Target, seed: int) -> LoadReport:
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
    return LoadReport()


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
        for store in _stores(module):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = _like(tensor, _poisoned(torch.empty(tensor.shape, dtype=tensor.dtype)))
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
        module, leaf = _owner(unsharded, name)
        store = _stores(module)[0 if leaf in module._parameters else 1]
        store[leaf] = _like(store[leaf], value)
    transformers_compat.init_from_above(unsharded, unit)
    return {name: module._parameters.get(leaf, module._buffers.get(leaf)).detach()  # type: ignore[union-attr]
            for name in values for module, leaf in [_owner(unsharded, name)]}  # fmt: skip


def _poisoned(tensor: Tensor) -> Tensor:
    """Fill with a value that no initialization produces, to detect tensors that are not initialized."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())
