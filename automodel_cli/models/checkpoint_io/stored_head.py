"""The score layer of a classifier's checkpoint, and the settings of an embedding model, for a second fine-tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from automodel_cli.config.fix_syntax import list_override
from automodel_cli.config.warn import warn
from automodel_cli.models.checkpoint_io.sequence_classifier import SCORE
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import passthrough_tensors, source
from automodel_cli.models.hub.lazy_tensor import StoredTensor
from automodel_cli.models.lm_head import value_head
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from automodel_cli.models.model_part import ModelPart


def fill_scores(part: ModelPart, config: ModelConfig, head: ScoreHead | EmbeddingHead | None) -> None:
    """Fill the value head of this part, if it has one. All parts compare the checkpoint with `head` and warn."""
    stored = None
    match head:
        case EmbeddingHead():
            warn_of_other_settings(config, head)
        case ScoreHead():
            stored = stored_scores(config, head)
    if part.value_head is not None:
        own = value_head.read_value_head(source.folder(config)) if stored is None else None
        of_critic = own if own is not None and len(own) == part.value_head.out_features else None
        value_head.fill_value_head(part.value_head, of_critic if stored is None else stored)


def head_names(whole: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters of the LM head, before the model is cut."""
    head = whole.get_output_embeddings()
    prefixes = [name for name, module in whole.named_modules() if module is head]
    return frozenset(f"{prefix}.{name}" for prefix in prefixes for name, _ in head.named_parameters())


def stored_scores(config: ModelConfig, wanted: ScoreHead) -> Tensor | None:
    """Return the score weight `[L, D]` of a classifier's checkpoint, as stored, in the order of `wanted.labels`.

    Labels are compared by name. Names that transformers has invented (`LABEL_0`) are compared by their number only, as
    transformers does. Returns None if the checkpoint has no score. Warns and returns None if its score is another one.
    """
    if source.folder(config) is None:
        return None
    tensors = passthrough_tensors.lazy_tensors(source.weights(config).files)
    if SCORE not in tensors:
        return None
    hf_config = source.composite_config(config)
    labels = cast(dict[int, str], hf_config.id2label)
    names = [str(labels[index]) for index in range(len(labels))]
    if reason := _difference(hf_config, names, wanted, bias=tensors.get("score.bias")):
        warn("new_score_layer", "the score layer of %s is not used, because %s", config.pretrained, reason)
        return None
    weight_LD = tensors[SCORE][...]
    if set(names) == set(wanted.labels):
        return weight_LD[[names.index(label) for label in wanted.labels]]
    return weight_LD


def _difference(
    hf_config: PretrainedConfig, names: list[str], wanted: ScoreHead, *, bias: StoredTensor | None
) -> str | None:
    """Return why the stored score layer cannot be trained further, or None if it can."""
    of_tokens = any(name.endswith("ForTokenClassification") for name in hf_config.architectures or ())
    if of_tokens != wanted.of_tokens:
        return f"it scores {'tokens' if of_tokens else 'texts'}"
    if bias is not None and bias[...].any():
        return "it has a bias"
    have_names = names != [f"LABEL_{index}" for index in range(len(names))]
    if len(names) != wanted.num_outputs or (have_names and wanted.labels and set(names) != set(wanted.labels)):
        return f"its labels differ. To train it further, set {list_override('objective.labels', names)}"
    return None


def warn_of_other_settings(config: ModelConfig, wanted: EmbeddingHead) -> None:
    """Warn if a checkpoint of sentence-transformers was trained with another pooling or other prompts than `wanted`."""
    folder = source.folder(config)
    if folder is None:
        return
    found = []
    pooling = _pooling_of(_fields(folder / "1_Pooling" / "config.json"))
    if pooling and pooling != {"last": "lasttoken", "mean": "mean"}[wanted.pooling]:
        found.append(f"objective.pooling is {pooling}")
    prompts = cast(dict[str, str], _fields(folder / "config_sentence_transformers.json").get("prompts") or {})
    own = {"query": ("query_prompt", wanted.query_prompt), "document": ("passage_prompt", wanted.passage_prompt)}
    found += [f"{key} is {prompts[name]!r}" for name, (key, value) in own.items() if prompts.get(name, value) != value]
    if found:
        warn("other_embedding_settings", "%s was trained with other settings: %s", config.pretrained, ", ".join(found))


def _pooling_of(fields: dict[str, object]) -> str:
    """Return the modes of a pooling config in the names of sentence-transformers 5.4 and later, "" without a config."""
    named = fields.get("pooling_mode", "")
    flags = sorted(key for key, value in fields.items() if key.startswith("pooling_mode_") and value is True)
    modes = [flag.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for flag in flags]
    return "+".join(modes) or (named if isinstance(named, str) else "+".join(cast(list[str], named)))


def _fields(path: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return fields
