"""Weight loading into a sharded part. Each rank reads only its own bytes.

The loader of transformers does not see the part. It loads a *skeleton*: the same class on the meta device, with the
shardings and parameters of the part. The skeleton is loaded one decoder layer at a time. Each loaded tensor is copied
into the existing parameters of the part and freed. Adapters, wrappers and parameter identity therefore do not matter,
and peak memory is one layer above the part itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.models import conversion_compat, new_tokens, transformers_compat
from automodel_cli.models.checkpoint_io import stored_head
from automodel_cli.models.checkpoint_io.initialization import init_buffers, init_random
from automodel_cli.models.checkpoint_io.target import (
    Target,
    materialize,
    needs_full_tensor,
    owner_of,
    skeleton_of,
    to_meta,
    unit_of,
    whole_on_meta,
)
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import dequantize, multimodal_backbone, passthrough_tensors, source
from automodel_cli.models.hub.lazy_tensor import StoredTensor
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp import layers as mtp_layers
from automodel_cli.models.rng import seed_for
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform


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
            init_random(skeleton_of(unsharded, target), target, seed)
            report = LoadReport()
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
        in_whole = str if part.within is None else part.within.in_whole
        lora.fill_pretrained(part.model, config.lora.pretrained, in_whole)
    stored_head.fill_scores(part, config, score_head)
    return report


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
    mapping = conversion_compat.conversion_mapping(whole)
    no_place = set(conversion_compat.unclaimed_keys(whole, mapping, known_as.values()))
    unclaimed = [key for key in tensors if key not in known_as or known_as[key] in no_place]
    tensors = new_tokens.grown(tensors, config, repository, unclaimed)
    _fill_from({name: tensors[key] for key, name in known_as.items()}, whole, target, mapping, optional)
    return LoadReport(checkpoint.num_bytes_read, tuple(unclaimed), within)


def _fill_from(
    named_tensors: Mapping[str, StoredTensor],
    whole: PreTrainedModel,
    target: Target,
    mapping: list[WeightTransform],
    optional: frozenset[str] = frozenset(),
) -> None:
    """Load lazy tensors by hub name into the target, one layer after another. `whole` becomes the skeleton."""
    units: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in named_tensors.items():
        units.setdefault(unit_of(name), {})[name] = tensor
    target.joined = conversion_compat.joined_names(mapping, target.names)
    mapping = conversion_compat.settled_transposes(mapping, whole, named_tensors)
    skeleton = skeleton_of(whole, target)
    for plain in units.values():
        done = conversion_compat.convert_into(skeleton, plain, mapping, skeleton.dtype)
        if done.mismatched:
            raise ConfigError(
                f"the checkpoint does not match the model: {'; '.join(done.mismatched[:3])}",
                code="weights_mismatch",
                keys=("pretrained",),
            )
        for name in sorted(done.loaded):
            module, leaf = owner_of(skeleton, name)
            value = module._parameters.get(leaf, module._buffers.get(leaf))
            assert value is not None
            if not value.is_meta:
                param = target.tensors[target.names[name]]
                cut = name in target.joined or needs_full_tensor(param)
                target.fill(name, transformers_compat.local_part(param, value.detach()) if cut else value.detach())
                to_meta(module, leaf)
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
        mapping = conversion_compat.conversion_mapping(unsharded)
        no_place = set(conversion_compat.unclaimed_keys(unsharded, mapping, known_as.values()))
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
