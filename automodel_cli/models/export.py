"""A trained part -> a folder that `transformers.from_pretrained` loads, and the proof that it does.

Written: safetensors shards with an index, config (older readers' `torch_dtype`, `rope_theta` and `rope_scaling` too),
generation config, tokenizer with its chat template, and a model card.
"""

from __future__ import annotations

import copy
import glob
import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.data.batch import one_document
from automodel_cli.distributed.fp8_linear import paused
from automodel_cli.models import carried, classifier, compat, generation_settings, lora, nf4, value_head
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.part import ModelPart
from automodel_cli.models.weights import bucketed, iter_hf_weights, over_stages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_SHARD_BYTES = 4 * 2**30
_LAST = "config.json"
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
) -> None:
    """Write the whole model in the hub's names, layout and dtype; adapters are merged in, a value head lies beside it,
    and what the checkpoint holds besides is written as it was. Of a composite every file but the weights is the
    original's. `as_classifier`: a reward model instead (`models/classifier.py`), the value head its score.

    Collective; rank 0 writes. `title` and `summary` (markdown) are for the model card (data, steps, scores).
    `stop_ids`: the tokens at which training taught the model to stop. The folder is safe to load only after this
    returns: write into a new one and `publish` it.
    """
    writer = is_first_rank()
    folder = Path(directory)
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[list[str], int]] = []
    within = parts[0].within
    hub_keys = {} if within is None else {name: key for key, name in within.keys.items()}
    left_out = classifier.head_prefix(parts[0]) if as_classifier else None
    for bucket in iter_hf_weights(parts, bucket_bytes=shard_bytes, device="cpu", pp_group=pp_group, multi_token=True):
        kept = [item for item in bucket if left_out is None or not item[0].startswith(left_out)]
        if writer and kept:
            shards.append(
                _write_shard(folder, len(shards), [(hub_keys.get(name, name), tensor) for name, tensor in kept])
            )
    mine = value_head.named_weights(parts)
    values = list(mine if pp_group is None else over_stages(mine, pp_group, parts[0], "cpu"))
    if writer and as_classifier:
        ((_, score),) = values
        shards.append(_write_shard(folder, len(shards), [(classifier.SCORE, score.to("cpu", parts[0].hub_dtype))]))
        _write_index(folder, shards)
        _write_config(folder, parts[0], classifier.config_of(parts[0].source_config, tokenizer))
        if tokenizer is not None:
            _write_tokenizer(folder, tokenizer)
        _write_card(folder, parts[0], config, title or folder.name, summary, as_classifier=True)
    elif writer:
        for bucket in bucketed(carried.tensors(config, parts[0].unclaimed, parts[0].hub_dtype), shard_bytes):
            shards.append(_write_shard(folder, len(shards), bucket))
        _write_index(folder, shards)
        value_head.write(folder, values)
        if within is not None:
            carried.copy_files(config, folder)
        else:
            _write_config(folder, parts[0])
            if tokenizer is not None:
                _write_tokenizer(folder, tokenizer)
        generation_settings.write(folder, config, parts[0].model, stop_ids)
        if not (folder / "README.md").exists():
            _write_card(folder, parts[0], config, title or folder.name, summary)
    if dist.is_initialized():
        dist.barrier()


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
    (folder / _LAST).unlink(missing_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    for path in sorted(written.iterdir(), key=lambda path: path.name == _LAST):
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
    hf_config = copy.deepcopy(part.source_config) if classifier_config is None else classifier_config
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

    Both sides compute in the part's own dtype, the part with its weights rounded to the exported dtype and without
    products of 8-bit floats, so what remains is the noise of another attention implementation (about 1e-5 in fp32); the
    caller decides what it tolerates.
    `score` runs the trained side; None calls the one part, which then is the whole model. `as_classifier`: scores are
    compared instead, which `score` must give.
    Collective; every rank gets the number. Raises RunError when the folder does not load.
    """
    token_ids = [list(prompt) for prompt in prompts]
    with torch.no_grad(), _rounded(parts), paused(parts):
        ours = (score or _whole(parts))(token_ids)
    difference = torch.zeros((), device=next(parts[0].parameters()).device)
    if is_first_rank():
        folder, dtype = Path(directory), parts[0].model.dtype
        if as_classifier:
            difference += classifier.difference(folder, dtype, token_ids, ours)
        else:
            difference += _difference(folder, dtype, token_ids, ours, trust_remote_code)
    if dist.is_initialized():
        dist.broadcast(difference, 0)
    return difference.item()


def _whole(parts: Sequence[ModelPart]) -> Score:
    (part,) = parts
    device = next(part.parameters()).device

    def score(prompts: list[list[int]]) -> list[Tensor]:
        with _in_eval(part):
            batches = [one_document(ids).to(device) for ids in prompts]
            return [part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1].cpu() for batch in batches]

    return score


def _difference(
    folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]], ours: list[Tensor], trust: bool
) -> float:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        with compat.quiet():
            of_text = trust or type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
            auto = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
            model = auto.from_pretrained(folder, dtype=dtype, trust_remote_code=trust).eval()
    except Exception as error:  # whatever it is, the export is not what we promise
        raise RunError(f"the export in {folder} does not load with transformers: {error}") from error
    worst = 0.0
    for prompt, logprobs_T in zip(prompts, ours, strict=True):
        ids_BT = torch.tensor([list(prompt)])
        with torch.no_grad():
            logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        theirs_T = logits.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[0, :, 0]
        gap = (theirs_T - logprobs_T).abs().max().item()
        worst = max(worst, gap if gap == gap else float("inf"))  # NaN compares as a mismatch, never as agreement
    return worst


@contextmanager
def _in_eval(part: ModelPart) -> Iterator[None]:
    before = part.training
    part.eval()
    try:
        yield
    finally:
        part.train(before)


@contextmanager
def _rounded(parts: Sequence[ModelPart]) -> Iterator[None]:
    """Inside, parameters hold what the export stores: adapters merged (and silent), all in the hub's dtype."""
    kept: list[tuple[Tensor, Tensor]] = []
    scalings: list[tuple[dict[str, float], dict[str, float]]] = []
    packed: list[nf4.NF4Linear] = []
    for part in parts:
        keep_fp32 = compat.fp32_names(part.model, part.hub_dtype)
        adapters = {f"{name}.base_layer.weight": layer for name, layer in lora.wrappers(part.model)}
        for name, param in part.model.named_parameters():
            local = compat.local(param)
            stored = local
            if name in adapters:
                stored = compat.local_part(param, lora.merged(compat.gathered(param), adapters[name]))
            if "lora_" not in name and not keep_fp32(name):
                stored = stored.to(part.hub_dtype)
            if stored is not local:
                kept.append((local, local.clone()))
                local.copy_(stored)
        for wrapper in adapters.values():
            if isinstance(base := wrapper.get_base_layer(), nf4.NF4Linear):
                base.instead = partial(_merged, base, wrapper, lora.scale(wrapper), part.hub_dtype)
                packed.append(base)
        scalings += [(layer.scaling, dict(layer.scaling)) for layer in adapters.values()]
    for scaling, _ in scalings:
        scaling.update(dict.fromkeys(scaling, 0.0))
    try:
        yield
    finally:
        for local, original in kept:
            local.copy_(original)
        for base in packed:
            base.instead = None
        for scaling, before in scalings:
            scaling.update(before)


def _merged(base: nf4.NF4Linear, wrapper: Any, scale: float, dtype: torch.dtype) -> Tensor:
    """The exported weight of a 4-bit layer, made anew in each forward: all of them at once may not fit."""
    return lora.merged(base.dequantised(), wrapper, scale).to(dtype)
