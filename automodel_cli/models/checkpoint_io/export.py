"""A trained part -> a folder that `transformers.from_pretrained` loads.

Written: safetensors shards with an index, config (older readers' `torch_dtype`, `rope_theta` and `rope_scaling` too),
generation config, tokenizer with its chat template, and a model card.
"""

from __future__ import annotations

import functools
import glob
import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import one_document
from automodel_cli.distributed import process_group
from automodel_cli.distributed.float8.linear import paused
from automodel_cli.models import lora
from automodel_cli.models.checkpoint_io import export_check, generation_config, sequence_classifier
from automodel_cli.models.checkpoint_io.export_check import Precision
from automodel_cli.models.checkpoint_io.weight_stream import bucketed, iter_hf_weights, over_stages
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import passthrough_tensors
from automodel_cli.models.lm_head import value_head
from automodel_cli.models.model_part import ModelPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_SHARD_BYTES = 4 * 2**30
_WAIT = timedelta(minutes=60)
MARK = "unverified.json"
"""The file in an export that was not compared with the trained model, or does not compute what it does."""
LAST = "config.json"
"""Without it no reader takes the folder for a model."""
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
    shard_bytes: int = _SHARD_BYTES,
    pp_group: dist.ProcessGroup | None = None,
    as_classifier: bool = False,
    stop_ids: Sequence[int] = (),
    trained: bool = False,
) -> None:
    """Write the whole model in the hub's names, layout and dtype; adapters are merged in, a value head lies beside it,
    and what the checkpoint holds besides is written as it was. Of a composite every file but the weights is the
    original's. `as_classifier`: a reward model instead (`models/checkpoint_io/sequence_classifier.py`), the value
    head its score.

    Collective; rank 0 writes. `title` and `summary` (markdown) are for the model card (data, steps, scores).
    `stop_ids`: the tokens at which training taught the model to stop. `trained`: the parameters have moved since they
    were loaded, so that rounding to 16 bits must keep the mean of their changes. The folder is safe to load only after
    this returns: write into a new one and `publish` it.
    """
    writer = is_first_rank()
    folder = Path(directory)
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[list[str], int]] = []
    within = parts[0].within
    hub_keys = {} if within is None else {name: key for key, name in within.keys.items()}
    left_out = sequence_classifier.head_prefix(parts[0]) if as_classifier else None
    stream = iter_hf_weights(
        parts, bucket_bytes=shard_bytes, device="cpu", pp_group=pp_group, multi_token=True, keep_mean=trained
    )
    for bucket in stream:
        kept = [item for item in bucket if left_out is None or not item[0].startswith(left_out)]
        if writer and kept:
            shards.append(
                _write_shard(folder, len(shards), [(hub_keys.get(name, name), tensor) for name, tensor in kept])
            )
    mine = value_head.named_weights([part.value_head for part in parts if part.value_head is not None])
    values = list(mine if pp_group is None else over_stages(mine, pp_group, parts[0], "cpu"))
    if writer:
        card = functools.partial(_write_card, folder, parts[0], config, title or folder.name, summary)
        if as_classifier:
            _finish_classifier(folder, shards, parts[0], values, tokenizer)
            card(as_classifier=True)
        else:
            _finish_model(folder, shards, parts[0], values, tokenizer, config, shard_bytes)
            generation_config.write_generation_config(folder, config, parts[0].model, stop_ids)
            if not (folder / "README.md").exists():
                card()
    if dist.is_initialized():
        dist.barrier()


def _finish_classifier(
    folder: Path,
    shards: list[tuple[list[str], int]],
    part: ModelPart,
    values: Sequence[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write the score in the value head's place, the index, and the config of a reward model."""
    ((_, score),) = values
    shards.append(_write_shard(folder, len(shards), [(sequence_classifier.SCORE, score.to("cpu", part.hub_dtype))]))
    _write_index(folder, shards)
    _write_config(folder, part, sequence_classifier.config_of(part.source_config, tokenizer))
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer)


def _finish_model(
    folder: Path,
    shards: list[tuple[list[str], int]],
    part: ModelPart,
    values: Sequence[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None,
    config: ModelConfig,
    shard_bytes: int,
) -> None:
    """Write the tensors that the model does not build, the index, the value head, and the config files."""
    for bucket in bucketed(passthrough_tensors.tensors(config, part.unclaimed, part.hub_dtype), shard_bytes):
        shards.append(_write_shard(folder, len(shards), bucket))
    _write_index(folder, shards)
    value_head.write_value_head(folder, values)
    if part.within is not None:
        passthrough_tensors.copy_files(config, folder)
        return
    _write_config(folder, part)
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer)


def staging(folder: Path) -> Path:
    """A new empty folder beside `folder`, where an export is written and checked. What a killed export left is
    removed.
    """
    discard_staged(folder)
    path = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    path.mkdir(parents=True)
    return path


def discard_staged(folder: Path) -> None:
    """Remove what was staged for `folder` and not published."""
    for stale in folder.parent.glob(f".{glob.escape(folder.name)}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)


def publish(written: Path, folder: Path) -> None:
    """Move a whole export into place. An older one there does not load from the first moment on until the new one is
    whole; files of other names stay.
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


def _write_shard(folder: Path, number: int, bucket: list[tuple[str, Tensor]]) -> tuple[list[str], int]:
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in bucket}
    save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(tensors), sum(t.numel() * t.element_size() for t in tensors.values())


def _write_index(folder: Path, shards: list[tuple[list[str], int]]) -> None:
    """Give the shards the hub's names, which need their count, and say which key is where."""
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    total = len(shards)
    if total == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, (names, _) in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{total:05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(size for _, size in shards)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_config(folder: Path, part: ModelPart, classifier_config: PretrainedConfig | None = None) -> None:
    hf_config = part.untied(part.source_config) if classifier_config is None else classifier_config
    if classifier_config is None:
        hf_config.architectures = [type(part.model).__name__]
    hf_config.dtype = part.hub_dtype
    hf_config.quantization_config = None  # a GGUF source carries one, and the library then refuses to save
    hf_config.use_cache = True
    hf_config.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("quantization_config", None)
    fields.update(_for_older_readers(fields, part.hub_dtype))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _for_older_readers(fields: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """transformers 4 and inference engines read these names; version 5 writes only `dtype` and `rope_parameters`."""
    older: dict[str, Any] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        older["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            older["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return older


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    if fields.get("tokenizer_class") == "TokenizersBackend":  # a name that only transformers 5 knows
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _write_card(
    folder: Path, part: ModelPart, config: ModelConfig, title: str, summary: str, *, as_classifier: bool = False
) -> None:
    base = config.pretrained or config.gguf_file
    hub_id = base is not None and config.gguf_file is None and not Path(base).exists()
    task = "text-classification" if as_classifier else "text-generation"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}"]
    lines += [f"base_model: {base}"] if hub_id else []
    lines += ["tags:", "- automodel", "---", "", f"# {title}", ""]
    origin = f"Fine-tuned from `{base}`" if base else "Trained from random weights"
    adapters = ", low-rank adapters merged in" if config.lora is not None else ""
    lines += [f"{origin} with `automodel`{adapters}. Architecture: `{type(part.model).__name__}`.", ""]
    lines += [summary.strip(), ""] if summary.strip() else []
    kind = "AutoModelForSequenceClassification" if as_classifier else "AutoModelForCausalLM"
    lines += ["A reward model: `logits[0, 0]` is the score of the conversation.", ""] if as_classifier else []
    lines += [
        "```python",
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'model = {kind}.from_pretrained("<this folder>")',
        'tokenizer = AutoTokenizer.from_pretrained("<this folder>")',
        "```",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def verify_export(
    directory: str | Path,
    parts: Sequence[ModelPart],
    prompts: Sequence[Sequence[int]],
    *,
    score: Score | None = None,
    trust_remote_code: bool = False,
    as_classifier: bool = False,
) -> float:
    """Reload the folder with stock `transformers` and compare log-probs on `prompts` (token ids): max |difference|.

    The trained side is the forward of `parts` as they are, adapters on, without products of 8-bit floats. `score` runs
    it; None calls the one part, which then is the whole model. `as_classifier`: scores are compared instead, which
    `score` must give. How far the two sides may differ depends on their precision:
    `export_check.measure_export_error` has bounds.
    Collective; every rank gets the number. Raises RunError when the folder does not load.
    """
    token_ids = [list(prompt) for prompt in prompts]
    ours = trained_values(parts, token_ids, score)
    precision = Precision(parts[0].model.dtype, rounds_weights=rounds_weights(parts))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "as_classifier": as_classifier}
    work = partial(export_check.measure_export_error, Path(directory), token_ids, ours, precision, **options)
    return process_group.from_first_rank(work, _WAIT).worst


def trained_values(parts: Sequence[ModelPart], prompts: list[list[int]], score: Score | None = None) -> list[Tensor]:
    """What `score` makes of the prompts, or the one part, without products of 8-bit floats. Collective."""
    with torch.no_grad(), paused(parts):
        return (score or _whole(parts))(prompts)


def rounds_weights(parts: Sequence[ModelPart]) -> bool:
    """Whether the export stores fewer bits than what was trained: its dtype is narrower, or a merge is rounded."""
    part = parts[0]
    stored = torch.finfo(part.hub_dtype).bits
    trained = max((torch.finfo(p.dtype).bits for p in part.parameters() if p.is_floating_point()), default=stored)
    return stored < trained or (stored < torch.finfo(torch.float32).bits and bool(lora.wrappers(part.model)))


def _whole(parts: Sequence[ModelPart]) -> Score:
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
