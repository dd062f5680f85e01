"""Export of a trained part to a folder that `transformers.from_pretrained` loads.

Contents: safetensors shards with an index, config (with `torch_dtype`, `rope_theta` and `rope_scaling` for older
readers), generation config, tokenizer with its chat template, and a model card.
"""

from __future__ import annotations

import copy
import functools
import glob
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import one_document
from automodel_cli.distributed.float8.linear import paused
from automodel_cli.distributed.qat.linear import switched
from automodel_cli.models.checkpoint_io import embedding_model, front_io, generation_config, sequence_classifier
from automodel_cli.models.checkpoint_io.export_files import (
    SHARD_BYTES,
    add_quantization,
    exported_quantization,
    write_card,
    write_config,
    write_index,
    write_shard,
    write_tokenizer,
)
from automodel_cli.models.checkpoint_io.weight_stream import bucketed, iter_hf_weights, over_stages
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import passthrough_tensors, source
from automodel_cli.models.lm_head import value_head
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead
from automodel_cli.models.vision.processor import load_processor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from automodel_cli.models.vision.front import Front

MARK = "unverified.json"
"""Marks an export that was not compared with the trained model, or differs from it."""
LAST = "config.json"
"""Written last. Readers do not recognize a folder without it as a model."""
Score = Callable[[list[list[int]]], list[Tensor]]
"""Prompts (token ids) -> log-probs of each prompt's tokens after the first, on the CPU."""


def export_hf(
    parts: Sequence[ModelPart],
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | Path,
    *,
    title: str = "",
    summary: str = "",
    shard_bytes: int = SHARD_BYTES,
    pp_group: dist.ProcessGroup | None = None,
    score_head: ScoreHead | EmbeddingHead | None = None,
    stop_ids: Sequence[int] = (),
    trained: bool = False,
) -> None:
    """Write the full model in the names, layout and dtype of the hub. Collective; rank 0 writes.

    Adapters are merged. A value head is written to a separate file. Checkpoint tensors without a counterpart in the
    model are copied. For a multimodal model, all files except the weights are those of the original. The folder is
    complete only after this returns. Write into a new folder and `publish` it.

    Args:
        title, summary: markdown for the model card (data, steps, scores).
        shard_bytes: maximum size of a file [bytes].
        score_head: write a reward model or classifier (`sequence_classifier.py`) whose score is the value head.
        stop_ids: tokens at which the model was trained to stop.
        trained: parameters have changed since loading, so rounding to 16 bits must preserve the mean of their changes.
    """
    writer = is_first_rank()
    folder = Path(directory)
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[list[str], int]] = []
    hub_keys = _hub_keys(parts[0])
    excluded_prefix = sequence_classifier.head_prefix(parts[0]) if score_head else None
    quantized = exported_quantization(parts[0]) is not None
    stream = functools.partial(iter_hf_weights, bucket_bytes=shard_bytes, device="cpu", pp_group=pp_group)
    for bucket in stream(parts, multi_token=True, keep_mean=trained, quantized=quantized):
        included = [item for item in bucket if excluded_prefix is None or not item[0].startswith(excluded_prefix)]
        if writer and included:
            renamed = [(_key_of(name, hub_keys), tensor) for name, tensor in included]
            shards.append(write_shard(folder, len(shards), renamed))
    local_values = value_head.named_weights([part.value_head for part in parts if part.value_head is not None])
    front = (item for part in parts for item in front_io.front_weights(part, part.hub_dtype, "cpu"))
    front_stream = front if pp_group is None or config.vision is None else over_stages(front, pp_group, parts[0], "cpu")
    for bucket in bucketed(front_stream, shard_bytes):
        shards += [write_shard(folder, len(shards), bucket)] if writer else []
    values = list(local_values if pp_group is None else over_stages(local_values, pp_group, parts[0], "cpu"))
    if writer:
        card = functools.partial(write_card, folder, parts[0], config, title or folder.name, summary)
        if score_head is not None:
            _finish_with_head(folder, shards, parts[0], values, tokenizer, score_head)
            card(score_head=score_head)
        else:
            _finish_model(folder, shards, parts[0], values, tokenizer, config, shard_bytes)
            generation_config.write_generation_config(folder, config, parts[0].model, stop_ids)
            if not (folder / "README.md").exists():
                card()
    if dist.is_initialized():
        dist.barrier()


def _hub_keys(part: ModelPart) -> dict[str, str]:
    """Return the keys of the composite that this model is a part of, by its own names. Empty for other models."""
    return {} if part.within is None else {name: key for key, name in part.within.keys.items()}


def _key_of(name: str, hub_keys: dict[str, str]) -> str:
    """Return the key of a tensor. Those of a quantized weight have the place of the weight."""
    prefix, _, leaf = name.rpartition(".")
    weight = hub_keys.get(f"{prefix}.weight")
    if name in hub_keys or weight is None or not leaf.startswith("weight_"):
        return hub_keys.get(name, name)
    return weight.removesuffix("weight") + leaf


def _finish_with_head(
    folder: Path,
    shards: list[tuple[list[str], int]],
    part: ModelPart,
    values: list[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None,
    score_head: ScoreHead | EmbeddingHead,
) -> None:
    match score_head:
        case EmbeddingHead():
            _finish_embedding(folder, shards, part, tokenizer, score_head)
        case ScoreHead():
            _finish_classifier(folder, shards, part, values, tokenizer, score_head)


def _finish_embedding(
    folder: Path,
    shards: list[tuple[list[str], int]],
    part: ModelPart,
    tokenizer: PreTrainedTokenizerBase | None,
    head: EmbeddingHead,
) -> None:
    """Write the index, the modules of sentence-transformers, and the config."""
    write_index(folder, shards)
    config = embedding_model.config_of(part, tokenizer)
    embedding_model.write_modules(folder, head, config.get_text_config().hidden_size)
    _finish_headless(folder, part, tokenizer, config)


def _finish_classifier(
    folder: Path,
    shards: list[tuple[list[str], int]],
    part: ModelPart,
    values: Sequence[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None,
    head: ScoreHead,
) -> None:
    """Write the value head as the score, the index, and the config of a classifier."""
    ((_, score),) = values
    tensors = sequence_classifier.scores_of(head, score.to("cpu", part.hub_dtype))
    shards.append(write_shard(folder, len(shards), tensors))
    write_index(folder, shards)
    _finish_headless(folder, part, tokenizer, sequence_classifier.config_of(part.source_config, tokenizer, head))


def _finish_headless(
    folder: Path, part: ModelPart, tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig
) -> None:
    """Write the config, and the tokenizer, which pads with the padding token of the config if it has none."""
    write_config(folder, part, config)
    if tokenizer is not None:
        if tokenizer.pad_token_id is None and config.pad_token_id is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
        write_tokenizer(folder, tokenizer)


def _finish_model(
    folder: Path,
    shards: list[tuple[list[str], int]],
    part: ModelPart,
    values: Sequence[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None,
    config: ModelConfig,
    shard_bytes: int,
) -> None:
    """Write the passthrough tensors, the index, the value head, and the config files."""
    for bucket in bucketed(passthrough_tensors.tensors(config, part.unclaimed, part.hub_dtype), shard_bytes):
        shards.append(write_shard(folder, len(shards), bucket))
    write_index(folder, shards)
    value_head.write_value_head(folder, values)
    if part.within is not None and config.pretrained is not None:
        passthrough_tensors.copy_files(config, folder)
        add_quantization(folder, part)
        return
    write_config(folder, part, None if part.front is None else _composite_config(part.front, config))
    if part.front is not None and tokenizer is not None:
        load_processor(config, tokenizer).save_pretrained(folder)
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer)


def _composite_config(front: Front, config: ModelConfig) -> PretrainedConfig:
    whole = source.composite_config(config)
    whole.architectures = [type(front.composite).__name__]
    return whole


def staging(folder: Path) -> Path:
    """Return a new empty folder next to `folder` for writing and checking an export. Remove leftovers of killed
    exports."""
    discard_staged(folder)
    path = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    path.mkdir(parents=True)
    return path


def discard_staged(folder: Path) -> None:
    """Remove unpublished staging folders of `folder`."""
    for stale in folder.parent.glob(f".{glob.escape(folder.name)}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)


def publish(written: Path, folder: Path) -> None:
    """Move a complete export into place.

    An older export in `folder` is not loadable until the new one is complete. Files with other names are kept.
    """
    if not folder.exists():
        written.rename(folder)
        return
    (folder / LAST).unlink(missing_ok=True)
    for stale in (*folder.glob("model*.safetensors*"), folder / MARK):
        stale.unlink(missing_ok=True)
    for path in sorted(written.iterdir(), key=lambda path: path.name == LAST):
        if path.is_dir():
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    written.rmdir()


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def trained_values(parts: Sequence[ModelPart], prompts: list[list[int]], score: Score | None = None) -> list[Tensor]:
    """Return the outputs of `score`, or of the single part, for the prompts. Collective.

    Without fp8 GEMMs, with quantized weights if the export has them, and without quantized inputs.
    """
    quantized = exported_quantization(parts[0]) is not None
    with torch.no_grad(), paused(parts), switched(parts, active=quantized, activations=False):
        return (score or _full_score(parts))(prompts)


def rounds_weights(parts: Sequence[ModelPart]) -> bool:
    """Return whether the export stores fewer bits than training: a narrower dtype, or a rounded merge."""
    part = parts[0]
    stored = torch.finfo(part.hub_dtype).bits
    trained = max((torch.finfo(p.dtype).bits for p in part.parameters() if p.is_floating_point()), default=stored)
    return stored < trained or (stored < torch.finfo(torch.float32).bits and lora.has_adapters(part.model))


def _full_score(parts: Sequence[ModelPart]) -> Score:
    (part,) = parts
    device = next(part.parameters()).device

    def score(prompts: list[list[int]]) -> list[Tensor]:
        with _in_eval(part):
            batches = [one_document(ids).to(device) for ids in prompts]
            return [part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1].cpu() for batch in batches]

    return score


@contextmanager
def _in_eval(part: ModelPart) -> Iterator[None]:
    before = part.training
    part.eval()
    try:
        yield
    finally:
        part.train(before)
