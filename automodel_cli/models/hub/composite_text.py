"""Causal LM classes for the text models of image-text composites.

The text model of a composite trains as a causal LM. Some families have no such class (Qwen3-VL, GLM-4V). Others have
one whose head differs from the composite's: `Cohere2ForCausalLM` scales its logits, Cohere2 Vision does not. The head
is therefore measured on the composite. If the family's own class does not match it, a class is made here from the text
model, the output matrix and the measured head.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.models import conversion_compat, transformers_compat
from automodel_cli.models.lm_head import detection
from automodel_cli.models.lm_head.scores import HeadKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PROBE_VOCAB = 64
_Measured = tuple[type["PreTrainedModel"], str, HeadKind]
_heads: dict[tuple[object, type, str], _Measured | None] = {}
_made: dict[tuple[object, ...], type[PretrainedConfig]] = {}


def composite_class(composite_config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of the composite: that of the checkpoint, otherwise the one for images and text."""
    import transformers
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    cls = getattr(transformers, next(iter(composite_config.architectures or ()), ""), None)
    if cls is None and type(composite_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        cls = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(composite_config)]
    return cls


def text_module(composite: PreTrainedModel) -> str | None:
    """Return the name of the text model inside the composite, None if there is not exactly one."""
    from transformers import MODEL_MAPPING

    kind = type(composite.config.get_text_config())
    if kind in MODEL_MAPPING:
        listed = MODEL_MAPPING[kind]
        for cls in listed if isinstance(listed, (tuple, list)) else (listed,):
            names = [name for name, module in composite.named_modules() if type(module) is cls and name]
            if len(names) == 1:
                result: str | None = names[0]
                return result
        return None
    decoder = composite.get_decoder()  # Ernie 4.5 VL: the library has no entry for its text model
    return next((name for name, module in composite.named_modules() if module is decoder and name), None)


def with_composite_head(text: PretrainedConfig, composite_config: PretrainedConfig) -> PretrainedConfig | None:
    """Return `text`, with which the library builds a causal LM that has the composite's head.

    The config gets a class of its own if no class of the library does. None: the composite has no such text model, or
    its head has no known form and the family has no causal LM class.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    cls = composite_class(composite_config)
    has_own = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        measured = None if cls is None else _measured(cls, composite_config)
    except Exception:  # a composite may need packages that text does not, or reject a small vocabulary
        measured = None
    if measured is None:
        return text if has_own else None
    base, table, kind = measured
    if kind.name == "generic" or (has_own and _same_head(detection.detect_head(text), kind)):
        return text if has_own else None
    key = (type(text), base, table, kind, cls)
    if key not in _made:
        assert cls is not None, "it was measured"
        _made[key] = _registered(type(text), base, table, kind, cls, str(composite_config.model_type))
    text.__class__ = _made[key]
    return text


def _same_head(a: HeadKind, b: HeadKind) -> bool:
    return a.name == b.name and abs(a.value - b.value) <= 1e-4 * abs(b.value)


def _measured(cls: type[PreTrainedModel], composite_config: PretrainedConfig) -> _Measured | None:
    key = (cls, type(composite_config), composite_config.to_json_string())
    if key not in _heads:
        _heads[key] = _measure(cls, composite_config)
    return _heads[key]


@torch.no_grad()
def _measure(cls: type[PreTrainedModel], composite_config: PretrainedConfig) -> _Measured | None:
    """Return the class of the text model, the name of its embedding, and the composite's head.

    The composite is on the meta device with a vocabulary of 64. Its text model returns given hidden states.
    """
    small = copy.deepcopy(composite_config)
    for config in (small, small.get_text_config()):
        config.pad_token_id = 0
    small.get_text_config().vocab_size = _PROBE_VOCAB
    with torch.device("meta"), transformers_compat.quiet():
        composite = cls._from_config(small, dtype=torch.float32)
    name = text_module(composite)
    matrix = composite.get_output_embeddings()
    if name is None or type(matrix) is not nn.Linear:
        return None
    base = composite.get_submodule(name)
    table = next(n for n, m in base.named_modules() if m is base.get_input_embeddings())
    generator = torch.Generator().manual_seed(0)
    matrix.to_empty(device="cpu")
    for param in matrix.parameters():
        param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    hidden_BTD = torch.randn(1, 32, matrix.weight.shape[1], generator=generator) * 4
    place = _outermost_without(composite, name, matrix)
    parent, _, child = place.rpartition(".")
    holder = composite.get_submodule(parent)
    setattr(holder, child, detection.stub_base(composite.get_submodule(place), hidden_BTD))
    logits_BTV: Tensor = composite(inputs_embeds=hidden_BTD, use_cache=False).logits
    cap = getattr(small.get_text_config(), "final_logit_softcapping", None)
    return type(base), table, detection.classify(logits_BTV, F.linear(hidden_BTD, matrix.weight, matrix.bias), cap)


def _outermost_without(composite: nn.Module, name: str, matrix: nn.Module) -> str:
    """Return the outermost module on the way to `name` that does not contain the output matrix."""
    paths = module_paths(name)
    return next(path for path in paths if matrix not in set(composite.get_submodule(path).modules()))


def module_paths(name: str) -> list[str]:
    """Return the names of the modules on the way to `name`, the outermost first: `a`, `a.b`, `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _apply(kind: HeadKind, logits: Tensor) -> Tensor:
    if kind.name == "scale":
        return logits * kind.value
    return kind.value * torch.tanh(logits / kind.value) if kind.name == "softcap" else logits


def _registered(
    text_class: type[PretrainedConfig],
    base: type[PreTrainedModel],
    table: str,
    kind: HeadKind,
    whole: type[PreTrainedModel],
    model_type: str,
) -> type[PretrainedConfig]:
    """Make a causal LM class and a config class of its own for it, and register them with the library.

    `whole`, `model_type`: of the composite.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    own_text_class = type(text_class.__name__, (text_class,), {"__module__": text_class.__module__})
    causal = _causal_class(own_text_class, base, table, kind)
    transformers_compat.register_classes(own_text_class, base, causal)
    if text_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        conversion_compat.share_converters(whole, model_type, causal)
    return own_text_class


def is_made_here(config: PretrainedConfig) -> bool:
    """Return whether the causal LM of this config is a class of this module, and not of the library."""
    return type(config) in _made.values()


def _causal_class(
    text_class: type[PretrainedConfig], base: type[PreTrainedModel], table: str, kind: HeadKind
) -> type[PreTrainedModel]:
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

    family: Any = next(cls for cls in base.__mro__[1:] if issubclass(cls, PreTrainedModel))

    class TextOfComposite(family, GenerationMixin):  # type: ignore[misc]  # a base class found at run time
        config_class = text_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": f"model.{table}.weight"}  # noqa: RUF012  # as the library declares it
        _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

        def __init__(self, config: PretrainedConfig):
            super().__init__(config)
            self.model = base(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: Tensor | None = None,
            attention_mask: object = None,
            position_ids: Tensor | None = None,
            past_key_values: object = None,
            cache: object = None,
            inputs_embeds: Tensor | None = None,
            use_cache: bool | None = None,
            logits_to_keep: int | Tensor = 0,
            **kwargs: object,
        ) -> CausalLMOutputWithPast:
            # transformers 5.24 renamed past_key_values to cache. The old name can go when 5.24 is the oldest release.
            caches = {"past_key_values": past_key_values, "cache": cache}
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{name: value for name, value in caches.items() if value is not None},
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = _apply(kind, self.lm_head(output[0][:, kept, :]))
            kept_caches = {name: output[name] for name in output if name in caches}  # `in output` logs old names
            return CausalLMOutputWithPast(logits=logits, **kept_caches)

    # The library looks up experts, attention and checkpoint names by the module of a class.
    TextOfComposite.__module__ = family.__module__
    TextOfComposite.__name__ = TextOfComposite.__qualname__ = f"{base.__name__.removesuffix('Model')}OfComposite"
    return TextOfComposite
