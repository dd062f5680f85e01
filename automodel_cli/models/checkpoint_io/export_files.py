"""Files of an exported folder: shards with their index, config, tokenizer and model card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import compressed_tensors
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


_EMBEDDING_CLASS = "SentenceTransformer"
SHARD_BYTES = 4 * 2**30


def write_shard(folder: Path, index: int, bucket: list[tuple[str, Tensor]]) -> tuple[list[str], int]:
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in bucket}
    save_file(tensors, folder / f"part-{index}.safetensors", metadata={"format": "pt"})
    return list(tensors), sum(t.numel() * t.element_size() for t in tensors.values())


def write_index(folder: Path, shards: list[tuple[list[str], int]]) -> None:
    """Rename the shards to hub names, which contain their count, and write the index."""
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    total = len(shards)
    if total == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for position, (names, _) in enumerate(shards):
        file = f"model-{position + 1:05d}-of-{total:05d}.safetensors"
        (folder / f"part-{position}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(size for _, size in shards)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_config(folder: Path, part: ModelPart, classifier_config: PretrainedConfig | None = None) -> None:
    hf_config = part.untied(part.source_config) if classifier_config is None else classifier_config
    if classifier_config is None:
        hf_config.architectures = [type(part.model).__name__]
    hf_config.dtype = part.hub_dtype
    hf_config.quantization_config = None  # GGUF sources have one, with which transformers does not save
    hf_config.use_cache = True
    hf_config.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("quantization_config", None)
    fields.update(_for_older_readers(fields, part.hub_dtype))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    add_quantization(folder, part)


def add_quantization(folder: Path, part: ModelPart) -> None:
    """Add the quantization of the export, if it has one, to its config."""
    quantization = exported_quantization(part)
    if quantization is None:
        return
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    described = compressed_tensors.quantization_config(replace(quantization, ignored=_ignored(part, quantization)))
    path.write_text(json.dumps(fields | {"quantization_config": described}, indent=2, sort_keys=True) + "\n")


def _ignored(part: ModelPart, quantization: FakeQuantization) -> tuple[str, ...]:
    """Return the layers that keep their precision, by their names in the exported model."""
    names = list(quantization.ignored)
    if part.within is not None:
        names = [part.within.in_whole(name) for name in names]
    if part.front is not None:
        modules = part.front.composite.named_modules()
        linear = [name for name, module in modules if isinstance(module, nn.Linear)]
        # vLLM names the layers of a tower in its own way (`vision_tower.vision_model.` in gemma 3).
        towers = dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in linear)
        names += [*linear, *(rf"re:(.*\.)?{tower}(\..*)?$" for tower in towers)]
    # Copied to the export, such as the tower of a model that is trained on text.
    return (*names, *(key.removesuffix(".weight") for key in part.unclaimed if key.endswith(".weight")))


def _for_older_readers(fields: dict[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return the fields for transformers 4 and inference engines. Version 5 writes `dtype` and `rope_parameters`."""
    older: dict[str, object] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        older["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            older["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return older


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    if fields.get("tokenizer_class") == "TokenizersBackend":  # exists in transformers 5 only
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def write_card(
    folder: Path,
    part: ModelPart,
    config: ModelConfig,
    title: str,
    summary: str,
    *,
    score_head: ScoreHead | EmbeddingHead | None = None,
) -> None:
    base = config.pretrained or config.gguf_file
    hub_id = base is not None and config.gguf_file is None and not Path(base).exists()
    reads_pictures = part.front is not None
    task, kind, described = _described(score_head, reads_pictures=reads_pictures)
    is_embedding = kind == _EMBEDDING_CLASS
    library = "sentence-transformers" if is_embedding else "transformers"
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {task}"]
    lines += [f"base_model: {base}"] if hub_id else []
    lines += ["tags:", "- automodel", "---", "", f"# {title}", ""]
    origin = f"Fine-tuned from `{base}`" if base else "Trained from random weights"
    adapters = ", low-rank adapters merged in" if config.lora is not None else ""
    lines += [f"{origin} with `automodel`{adapters}. Architecture: `{type(part.model).__name__}`.", ""]
    lines += [summary.strip(), ""] if summary.strip() else []
    lines += [described, ""] if described else []
    code = [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'model = {kind}.from_pretrained("<this folder>")',
        'tokenizer = AutoTokenizer.from_pretrained("<this folder>")',
    ]
    if is_embedding:
        code = [f"from sentence_transformers import {kind}", "", f'model = {kind}("<this folder>")']
        code += ["queries, documents = model.encode_query([...]), model.encode_document([...])"]
    lines += ["```python", *code, "```"]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _described(head: ScoreHead | EmbeddingHead | None, *, reads_pictures: bool) -> tuple[str, str, str]:
    """Return the task of the hub, the class that loads the folder, and a sentence on its outputs ("" for none)."""
    match head:
        case EmbeddingHead():
            return "sentence-similarity", _EMBEDDING_CLASS, ""
        case None if reads_pictures:
            return "image-text-to-text", "AutoModelForImageTextToText", ""
        case None:
            return "text-generation", "AutoModelForCausalLM", ""
    labels = f"Labels: {', '.join(head.labels)}."
    if head.of_tokens:
        return "token-classification", "AutoModelForTokenClassification", labels
    reward = "A reward model: `logits[0, 0]` is the score of the conversation."
    return "text-classification", "AutoModelForSequenceClassification", labels if head.labels else reward


def exported_quantization(part: ModelPart) -> FakeQuantization | None:
    """Return the quantization of the export, or None if the export has unquantized weights. Equal on all stages."""
    quantization = part.quantization
    return quantization if quantization is not None and quantization.exports else None
