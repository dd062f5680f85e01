"""Fill a part with weights, after it has been parallelised: each rank reads only the bytes it holds.

The part itself is never given to the library's loader. A *skeleton*, the same class on the meta device with the part's
shardings and only the part's parameters, is loaded decoder layer by decoder layer, and each loaded piece is copied
into the part's existing parameters and dropped. So adapters, wrappers and the identity of the parameters do not
matter, and the peak is one layer above the part itself.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.models import lora, nf4, transformers_compat
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import dequantize, multimodal_backbone, passthrough_tensors, source
from automodel_cli.models.lm_head import value_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp import layers as mtp_layers
from automodel_cli.models.rng import seed_for
from automodel_cli.models.uneven_dtensor import is_uneven

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class LoadReport:
    """`num_bytes_read` of checkpoint data by this rank; `unclaimed`: what the whole model has no place for; `within`:
    where the model is in the composite that the checkpoint is of."""

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
) -> LoadReport:
    """Allocate what is on meta on `device` (buffers and 4-bit weights on `buffer_device`, if other), fill everything.

    Plain parameters and DTensor shards alike; ties survive. Random weights depend on `seed` and the parameter's place
    in the model only, so every layout starts from the same numbers. Build the optimizer afterwards: allocation
    replaces parameters. Raises ConfigError for missing or misshapen weights, by name.
    """
    materialise(part, torch.device(device), buffer_device or torch.device(device))
    with lora.bare(part.model):
        target = _Target(part.model, buffer_device or torch.device(device))
        whole = _whole_on_meta(part, config)
        if config.config is not None:
            report = _init_random(_skeleton(whole, target), target, seed)
            _init_depths(part, config, seed, target.packed_device)
        else:
            weights = source.weights(config)
            if weights.gguf is not None:
                report = _load_gguf(part, config, weights.gguf, target)
                _init_buffers(_skeleton(whole, target), target)
            else:
                checkpoint = _Checkpoint(weights)
                report = _load_safetensors(whole, target, checkpoint, source.whole_config(config))
                _init_buffers(whole, target)
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
    lora.init_adapters(part.model, seed)
    if part.value_head is not None:
        value_head.fill_value_head(part.value_head, source.folder(config))
    return report


def _whole_on_meta(part: ModelPart, config: ModelConfig) -> PreTrainedModel:
    """The library's class with all layers: what a checkpoint's keys are compared with."""
    return transformers_compat.meta_model(
        copy.deepcopy(part.source_config),
        dtype=getattr(torch, config.dtype),
        trust_remote_code=config.trust_remote_code,
    )


def materialise(module: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Give memory to everything on meta. Unlike `Module.to_empty`, a tied parameter stays one parameter."""
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


class _Target:
    """The tensors to fill, by hub name; tied names share one entry under their first name. Weights that are packed into
    4 bits go to their layers, on `packed_device`.
    """

    def __init__(self, model: nn.Module, packed_device: torch.device):
        self.packed_device = packed_device
        self.joined: set[str] = set()
        self.packed = {f"{name}.weight": layer for name, layer in nf4.packed_layers(model)}
        self.names: dict[str, str] = {}  # every name -> first name of the same tensor
        self.tensors: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        named += [(name, layer.unloaded()) for name, layer in self.packed.items()]
        for name, tensor in named:
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
        """`value` is this rank's part of `name`. Of tied names the first filled wins; another must agree."""
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


def _skeleton(whole: PreTrainedModel, target: _Target) -> PreTrainedModel:
    """The whole model on meta, cut in place to the target's tensors and sharded as they are."""
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


def _read_whole(tensor: Any) -> bool:
    """Uneven shards, and those of which this rank has nothing (few heads over many ranks): the library's reader cannot
    cut them out."""
    return is_uneven(tensor) or (
        transformers_compat.is_dtensor(tensor) and transformers_compat.local(tensor).numel() == 0
    )


def unit_of(key: str) -> str:
    """Checkpoint or parameter key -> its decoder layer ("model.layers.3"), "" for what is outside the layers."""
    match = re.match(r"(.*?\.\d+)\.", key)
    return match.group(1) if match else ""


class _CountedSlice:
    """A lazy safetensors slice that counts what is really read, in a list: the library reads in several threads."""

    def __init__(self, lazy: Any, sizes: list[int]):
        self._lazy, self._sizes = lazy, sizes

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self._lazy[index]
        self._sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)


class _Checkpoint:
    """The tensors of safetensors files, read when they are indexed, and how many bytes that have been so far."""

    def __init__(self, weights: source.Weights):
        self._sizes: list[int] = []
        stored = {
            k: _CountedSlice(lazy, self._sizes) for k, lazy in passthrough_tensors.lazy_tensors(weights.files).items()
        }
        self.tensors = dequantize.dequantised(stored, weights.quantization)

    @property
    def num_bytes_read(self) -> int:
        return sum(self._sizes)


def _load_safetensors(
    whole: PreTrainedModel, target: _Target, checkpoint: _Checkpoint, repository: PretrainedConfig
) -> LoadReport:
    """`whole` becomes the target's skeleton. `repository`: the config beside the weights."""
    tensors = checkpoint.tensors
    within = None
    if multimodal_backbone.text_config(repository) is not repository:
        within = multimodal_backbone.text_of_whole(repository, whole, tensors)
    known_as = {key: key for key in tensors} if within is None else within.keys
    mapping = transformers_compat.conversion_mapping(whole)
    no_place = set(transformers_compat.unclaimed_keys(whole, mapping, known_as.values()))
    unclaimed = [key for key in tensors if key not in known_as or known_as[key] in no_place]
    _fill_from({name: tensors[key] for key, name in known_as.items()}, whole, target, mapping)
    return LoadReport(checkpoint.num_bytes_read, tuple(unclaimed), within)


def _fill_from(named: dict[str, Any], whole: PreTrainedModel, target: _Target, mapping: list[Any]) -> None:
    """Read `named` (hub name -> lazy tensor) into the target, one layer after another; `whole` becomes its
    skeleton."""
    units: dict[str, dict[str, Any]] = {}
    for name, tensor in named.items():
        units.setdefault(unit_of(name), {})[name] = tensor
    target.joined = transformers_compat.joined_names(mapping, target.names)
    skeleton = _skeleton(whole, target)
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
    """Fill the layers for multi-token prediction; what they take is unclaimed no more. A stage of a pipeline that has
    none of them learns that much."""
    names, tensors = part.depth_names, checkpoint.tensors
    if names is None:
        return report
    taken = set(names.copies)
    for i, known_as in enumerate(names.own_names(report.unclaimed)):
        whole = _whole_on_meta(part, config)
        mtp_layers.cut_to_depth(whole)
        mapping = transformers_compat.conversion_mapping(whole)
        no_place = set(transformers_compat.unclaimed_keys(whole, mapping, known_as.values()))
        mine = {key: name for key, name in known_as.items() if name not in no_place}
        taken |= mine.keys()
        if part.multi_token is not None:
            target = _Target(part.multi_token[i].model, buffer_device)  # type: ignore[arg-type]
            _fill_from({name: tensors[key] for key, name in mine.items()}, whole, target, mapping)
            _init_buffers(whole, target)
    if part.multi_token is not None:
        _compare_copies(names.copies, checkpoint, report)
    unclaimed = tuple(key for key in report.unclaimed if key not in taken)
    return replace(report, num_bytes_read=checkpoint.num_bytes_read, unclaimed=unclaimed)


def _init_depths(part: ModelPart, config: ModelConfig, seed: int, buffer_device: torch.device) -> None:
    """Random weights for the layers for multi-token prediction."""
    for i, depth in enumerate(part.multi_token or ()):
        whole = _whole_on_meta(part, config)
        mtp_layers.cut_to_depth(whole)
        target = _Target(depth.model, buffer_device)  # type: ignore[arg-type]
        _init_random(_skeleton(whole, target), target, seed_for(seed, f"multi_token.{i}"))


def _compare_copies(copies: dict[str, str], checkpoint: _Checkpoint, report: LoadReport) -> None:
    """Say so where the checkpoint's copy of a table is another than the table, which is used in its place. Each rank
    reads its share of the rows."""
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
    """The module's own parameters and buffers, to be replaced in place."""
    return [module._parameters, module._buffers]


def _like(original: Tensor, tensor: Tensor) -> Tensor:
    """A parameter where the original is one."""
    return nn.Parameter(tensor, original.requires_grad) if isinstance(original, nn.Parameter) else tensor


def _load_gguf(part: ModelPart, config: ModelConfig, gguf: tuple[str, str], target: _Target) -> LoadReport:
    """Through the library's own dequantising loader: the whole model on every rank, then this rank's part of it."""
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


def _init_random(skeleton: PreTrainedModel, target: _Target, seed: int) -> LoadReport:
    """The family's own initialisation, one decoder layer (or outer module) at a time, each from its own seed."""
    units: dict[str, list[str]] = {}
    for name in target.names:
        units.setdefault(unit_of(name) or name.rpartition(".")[0], []).append(name)
    for unit, names in units.items():
        values = _initialised(skeleton, unit, seed_for(seed, unit), recurse=unit_of(f"{unit}.") == unit)
        for name in names:
            if target.names[name] == name:
                value = values[name]
                target.fill(name, transformers_compat.local_part(target.tensors[name], value))
    assert not target.missing(), f"not initialised: {target.missing()[:3]}"
    return LoadReport()


def _init_buffers(skeleton: PreTrainedModel, target: _Target) -> None:
    """Buffers that no checkpoint holds (rotary tables) come from the family's initialisation."""
    for prefix in sorted({name.rpartition(".")[0] for name in target.non_persistent}):
        values = _initialised(skeleton, prefix, 0, recurse=False)
        for name in target.non_persistent & values.keys():
            target.fill(name, values[name])


@torch.no_grad()
def _initialised(skeleton: PreTrainedModel, unit: str, seed: int, *, recurse: bool) -> dict[str, Tensor]:
    """Values of the unit's tensors after the family's own initialisation on CPU; the skeleton stays on meta."""
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
        named = [*root.named_parameters(recurse=recurse), *root.named_buffers(recurse=recurse)]
        values = {f"{unit}.{name}".lstrip("."): tensor.detach() for name, tensor in named}
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
    """The values, those included that a model sets in the modules below it (Falcon-H1's multipliers). It may set them
    in every layer, so this takes a model that is not cut."""
    whole = transformers_compat.uncut_copy(skeleton)
    for name, value in values.items():
        module, leaf = _owner(whole, name)
        store = _stores(module)[0 if leaf in module._parameters else 1]
        store[leaf] = _like(store[leaf], value)
    transformers_compat.init_from_above(whole, unit)
    return {name: module._parameters.get(leaf, module._buffers.get(leaf)).detach()  # type: ignore[union-attr]
            for name in values for module, leaf in [_owner(whole, name)]}  # fmt: skip


def _poisoned(tensor: Tensor) -> Tensor:
    """Filled with a value that no initialisation leaves, so that what it forgets is seen."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())
