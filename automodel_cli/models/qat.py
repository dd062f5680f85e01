"""Select the linear layers of quantization-aware training, and convert them."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import NameList, check_entries, endings, ends_in
from automodel_cli.config.value_checks import require_package
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.qat.formats import Format
from automodel_cli.distributed.qat.linear import QATLinear, convert_to_qat
from automodel_cli.distributed.qat.settings import FakeQuantization, LowRank
from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models import lora, lora_dora, lora_init, lora_merge
from automodel_cli.models.lora_layer import AdapterLayer
from automodel_cli.models.lora_targets import bypassed, shared
from automodel_cli.models.qat_config import QATConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Sibling layers that engines join into one, with one factor of nvfp4 (the rule of llm-compressor)."""


def convert_layers(model: PreTrainedModel, config: QATConfig, read_dtype: torch.dtype) -> None:
    """Convert the linear layers inside the decoder layers, in place. Parameters may be on the meta device.

    Raises ConfigError for a model with experts, if no layer is left to quantize, and for a name that no layer has.
    """
    with lora.bare(model):
        _convert_linear(model, config, read_dtype)
    for name, wrapper in lora.wrappers(model):
        _convert_adapter(name, wrapper)


def _convert_linear(model: PreTrainedModel, config: QATConfig, read_dtype: torch.dtype) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    if config.export == "compressed-tensors":
        install = "'automodel-cli[qat]', or model.qat.export=plain"
        require_package("compressed_tensors", "the export of model.qat", install=install, keys=("qat",))
    if any(is_experts(module) for module in model.modules()):
        raise _refused(f"the experts of {type(model).__name__} are not quantized")
    layers = [layer for _, layer in modules_of(model, GradientCheckpointingLayer)]
    inside = {child for layer in layers for child in layer.modules() if type(child) is nn.Linear}
    linear = dict(modules_of(model, nn.Linear))
    candidates = {name: child for name, child in linear.items() if child in inside}
    _check_names("target_modules", config.target_modules, candidates)
    _check_names("exclude_modules", config.exclude_modules, candidates)
    # Code that reads a weight without calling its layer would see the weight before rounding.
    unread = bypassed(model) | shared(model)
    reasons = {name: reason for name, child in candidates.items() if (reason := _why_not(name, child, config, unread))}
    chosen = {name: child for name, child in candidates.items() if name not in reasons}
    left = "".join(f"; not {count} {reason}" for reason, count in Counter(reasons.values()).items())
    if not chosen:
        raise _refused(f"{type(model).__name__} has {len(candidates)} linear layers in decoder layers{left}")
    weights = Format(config.weight_dtype, config.weights_per_scale)
    activations = None if config.activation_dtype == "none" else Format(config.activation_dtype)
    # Listed in the export as exceptions. Engines read all other linear layers as quantized.
    ignored = tuple(name for name in linear if name not in chosen)
    quantization = FakeQuantization(
        weights,
        activations,
        read_dtype=read_dtype,
        ignored=ignored,
        active=config.fake_quant_after_n_steps == 0,
        exports=config.export == "compressed-tensors",
    )
    for name, child in chosen.items():
        convert_to_qat(child, quantization, _joined(model, name, chosen))
    logger.info("qat %s: %d linear layers%s", config.weight_dtype, len(chosen), left)


def _convert_adapter(name: str, wrapper: AdapterLayer) -> None:
    """Add the update of an adapter to the weight of its quantized layer before rounding, as its merged export does."""
    base = wrapper.get_base_layer()
    if not isinstance(base, QATLinear):
        return
    if lora_dora.has_magnitude(wrapper):
        raise _refused(f"{name} has an adapter with DoRA, whose norms are those of the unquantized rows")
    base.adapter = partial(_low_rank, wrapper)
    kind: Any = type(wrapper)
    wrapper.__class__ = _merging_class(kind)


def _low_rank(wrapper: AdapterLayer) -> LowRank:
    return LowRank(*lora_init.local_factors(wrapper), lora_merge.scale(wrapper))


@cache
def _merging_class(kind: Any) -> Any:
    return type(f"QAT{kind.__name__}", (_Merging, kind), {})


class _Merging(AdapterLayer):
    """Forward of an adapter whose base layer adds the update to its weight, mixed into the class of the adapter."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        base = self.base_layer
        assert isinstance(base, QATLinear), "its class was set for this reason"
        y: Tensor = base(x) if base.qat.active else super().forward(x, *args, **kwargs)
        return y


def _joined(model: nn.Module, name: str, chosen: dict[str, nn.Linear]) -> list[nn.Module]:
    parent, _, leaf = name.rpartition(".")
    names = next((group for group in _JOINED if leaf in group), (leaf,))
    return [chosen[full] for other in names if (full := f"{parent}.{other}".lstrip(".")) in chosen]


def _check_names(key: str, entries: list[str], linear: dict[str, nn.Linear]) -> None:
    listed = NameList(f"model.qat.{key}", entries, "no linear layer's name ends in")
    check_entries(listed, lambda ending: any(ends_in(name, ending) for name in linear), endings(linear))


def _why_not(name: str, linear: nn.Linear, config: QATConfig, unread: set[str]) -> str:
    """Empty for a layer that is quantized."""
    if any(ends_in(name, ending) for ending in config.exclude_modules):
        return "excluded"
    if config.target_modules and not any(ends_in(name, ending) for ending in config.target_modules):
        return "not selected"
    if name in unread:
        return "whose weight is shared or read by other code"
    group = config.weights_per_scale
    if group is not None and linear.in_features % group:
        return f"with {linear.in_features} inputs, no multiple of {group}"
    return ""


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"qat is not supported because {reason}", code="not_supported_by_model", keys=("qat",), fix="model.qat=null"
    )
