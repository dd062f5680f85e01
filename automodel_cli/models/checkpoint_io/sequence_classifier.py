"""Reward models and classifiers for other tools: a part with a value head as a transformers classifier.

`score` is the value head, applied to the last token of a row (`AutoModelForSequenceClassification`) or to every token
(`AutoModelForTokenClassification`). The LM head is not exported. Inference engines support the architecture or convert
the base model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from automodel_cli.config.composition import hub
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.encoding.labeled import padding_id
from automodel_cli.models import transformers_compat
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from automodel_cli.models.model_part import ModelPart

SCORE = "score.weight"
"""Name of the score weight in transformers classifiers."""
_EXPORTED = "a folder that `automodel rm llm` has exported"
_REWARD = ScoreHead()


def require_classifier(hf_config: PretrainedConfig, head: ScoreHead) -> type[PreTrainedModel]:
    """Return the transformers class with these scores. Raises ConfigError if the family has none."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    of_texts, of_tokens = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    kind, classifiers = type(hf_config), of_tokens if head.of_tokens else of_texts
    if kind in classifiers and kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        cls: Any = classifiers[kind]
        config = copy.deepcopy(hf_config)
        config.num_labels = head.num_outputs
        with transformers_compat.quiet(), torch.device("meta"):
            score = getattr(cls(config), "score", None)
        if isinstance(score, nn.Linear) and (score.bias is None or head.of_tokens):
            kept: type[PreTrainedModel] = cls
            return kept
    what = "token classifier" if head.of_tokens else "sequence classifier"
    raise ConfigError(
        f"{'classifiers' if head.labels else 'reward models'} are not supported for {hf_config.model_type} because "
        f"transformers has no {what} with a linear `score` for it",
        code="not_supported_by_model",
        keys=("model",),
    )


def require_exportable(hf_config: PretrainedConfig, head: ScoreHead | EmbeddingHead) -> None:
    """Raise ConfigError if transformers has no class for these scores. Every base model has embeddings."""
    if isinstance(head, ScoreHead):
        require_classifier(hf_config, head)


def head_prefix(part: ModelPart) -> str:
    """Return the prefix of the LM head's hub names, which a classifier does not have."""
    full_model = transformers_compat.meta_model(copy.deepcopy(part.source_config), dtype=torch.float32)
    head = full_model.get_output_embeddings()
    return next(f"{name}." for name, module in full_model.named_modules() if module is head)


def scores_of(head: ScoreHead, weight_LD: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of the score by their names. Token classifiers of transformers have a bias, here 0."""
    return [(SCORE, weight_LD)] + ([("score.bias", weight_LD.new_zeros(len(weight_LD)))] if head.of_tokens else [])


def config_of(
    hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None, head: ScoreHead
) -> PretrainedConfig:
    """Return the config of the export.

    transformers reads the score at the last token that is not padding, so padding must differ from the end of a row.
    Conversations end with EOS. If the tokenizer pads with EOS, the config has no padding token, and the classifier
    accepts one row at a time. Plain texts end with EOS only if the tokenizer appends it, so they are padded with it.
    """
    config = copy.deepcopy(hf_config)
    config.architectures = [require_classifier(hf_config, head).__name__]
    config.num_labels = head.num_outputs
    if head.labels:
        config.id2label = dict(enumerate(head.labels))
        config.label2id = {label: i for i, label in enumerate(head.labels)}
    config.problem_type = None if head.of_tokens else head.problem  # a classifier that is trained further has another
    if head.of_tokens:
        config.classifier_dropout = 0.0
    if head.plain_text and tokenizer is not None:
        config.pad_token_id = padding_id(tokenizer)
        return config
    eos_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = {*eos_ids, None if tokenizer is None else tokenizer.eos_token_id}
    pads = (config.pad_token_id, None if tokenizer is None else tokenizer.pad_token_id)
    config.pad_token_id = next((pad for pad in pads if pad is not None and pad not in ends), None)
    return config


def check_classifier(folder: str) -> None:
    """Raise ConfigError if the config of a folder or repository is not a classifier with one label."""
    from transformers import AutoConfig

    try:
        num_labels = AutoConfig.from_pretrained(folder).num_labels
    except (OSError, ValueError, ImportError) as error:
        if not Path(folder).exists() and hub.is_offline(error):
            message = f"folder={folder} cannot be loaded: {hub.not_here(folder)}"
            raise ConfigError(message, code="model_not_found", keys=("folder",), fix=hub.download(folder)) from error
        reason = (
            f"{type(error).__name__}: {error}"
            if Path(folder).is_dir()
            else "it is neither a folder nor an accessible hub repository"
        )
        raise ConfigError(
            f"folder={folder} cannot be loaded: {reason}", code="model_not_found", keys=("folder",), fix=_EXPORTED
        ) from error
    if num_labels != 1:
        raise ConfigError(
            f"folder={folder} is not a reward model, because its config has {num_labels} labels instead of 1",
            code="wrong_model_kind",
            keys=("folder",),
            fix=_EXPORTED,
        )


def load_classifier(
    folder: Path | str, dtype: torch.dtype | Literal["auto"], head: ScoreHead = _REWARD
) -> PreTrainedModel:
    """Load the reward model or classifier of a folder in eval mode on the CPU. "auto": stored dtype.

    Raises RunError.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForTokenClassification if head.of_tokens else AutoModelForSequenceClassification
    try:
        with transformers_compat.quiet():
            model, info = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except Exception as error:  # any failure means that the folder is not a classifier
        raise RunError(
            f"folder={folder} cannot be loaded with {auto.__name__}: {error}", code="model_not_found"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing or model.config.num_labels != head.num_outputs:
        reason = f"it lacks {', '.join(missing[:3])}" if missing else f"it has {model.config.num_labels} labels"
        what = "classifier with these labels" if head.labels else "reward model"
        raise RunError(f"folder={folder} is not a {what}, because {reason}", code="wrong_model_kind", fix=_EXPORTED)
    loaded: PreTrainedModel = model.eval()
    return loaded
