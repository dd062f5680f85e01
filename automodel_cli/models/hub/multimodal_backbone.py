"""Language models inside multimodal repositories (`...ForConditionalGeneration`): config and weights.

The language model is built and sharded alone, as its own class. Its keys in the checkpoint are determined by building
the full model on the meta device: the module that is the language model, and the head. The export restores every
original key and copies all other files of the repository.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import conversion_compat, transformers_compat
from automodel_cli.models.hub import composite_text

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def text_config(hf_config: PretrainedConfig, *, exported_alone: bool = False) -> PretrainedConfig:
    """Return the config of the language model if it has a causal class, else `hf_config` itself.

    The head is that of the full model (`composite_text.py`), or that of the family's causal class if the language model
    is `exported_alone`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = hf_config.get_text_config()
    if text is hf_config or hf_config.is_encoder_decoder or text.is_encoder_decoder:  # a decoder needs its encoder
        return hf_config
    text = copy.deepcopy(text)
    text.dtype = hf_config.dtype or text.dtype
    # transformers ties the head as the outer config says. A text config may lack the fields of a model of its own.
    text.tie_word_embeddings = getattr(hf_config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not hasattr(text, name):
            setattr(text, name, getattr(hf_config, name, None))
    if exported_alone:
        return text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else hf_config
    return composite_text.with_composite_head(text, hf_config) or hf_config


@dataclass(frozen=True)
class BackboneMapping:
    """Names of a language model inside the full model.

    keys: checkpoint key -> key of the language model. Keys of other parts are absent.
    modules: module of the language model -> module of the full model.
    """

    keys: dict[str, str]
    modules: dict[str, str]

    def in_whole(self, name: str) -> str:
        """Return the name in the full model of a module or parameter of the language model."""
        for of_text, of_whole in self.modules.items():
            if f"{name}.".startswith(f"{of_text}."):
                return of_whole + name.removeprefix(of_text)
        return name


def text_backbone(composite_config: PretrainedConfig, text: PreTrainedModel, keys: Iterable[str]) -> BackboneMapping:
    """Locate `text`, the language model, in the full model whose checkpoint has these keys.

    Raises ConfigError if the full model cannot be built or does not contain such a language model.
    """
    whole = _meta(composite_config)
    modules = _places(whole, text)
    keys_of_text = {}
    for key, name in conversion_compat.current_keys(whole, keys):
        for text_module, full_module in modules.items():
            if name.startswith(f"{full_module}."):
                keys_of_text[key] = text_module + name.removeprefix(full_module)
    return BackboneMapping(keys_of_text, modules)


def _meta(composite_config: PretrainedConfig) -> PreTrainedModel:
    import transformers

    name = next(iter(composite_config.architectures or ()), "")
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ConfigError(
            f"the architecture {name or 'of the checkpoint'} is not available in the installed transformers",
            code="version_mismatch",
            keys=("pretrained",),
        )
    try:
        with torch.device("meta"), transformers_compat.quiet():
            model: PreTrainedModel = cls(copy.deepcopy(composite_config))
    except ImportError as error:  # other modalities may need packages that text training does not
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} cannot be built: {reason}", code="missing_package", keys=("pretrained",)) from error
    return model


def _places(whole: PreTrainedModel, text: PreTrainedModel) -> dict[str, str]:
    """Return module of `text` -> module of `whole`: the base model, and the head if it is separate."""
    base_name = text.base_model_prefix
    base = type(text.get_submodule(base_name))
    inner = [name for name, module in whole.named_modules() if type(module) is base and name]
    if len(inner) != 1:
        raise ConfigError(
            f"{type(whole).__name__} is not supported because it has {len(inner)} modules of class {base.__name__} "
            "instead of one language model",
            code="not_supported_by_model",
            keys=("pretrained",),
        )
    head_of_whole, head_of_text = (_name_of(m, m.get_output_embeddings()) for m in (whole, text))
    places = {base_name: inner[0]}
    if head_of_whole and head_of_text:
        places[head_of_text] = head_of_whole
    return places


def _name_of(model: nn.Module, target: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is target), None)
