"""Select the linear layers of quantization-aware training, and convert them."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import NameList, check_entries, endings, ends_in
from automodel_cli.config.value_checks import require_package
from automodel_cli.distributed.expert_parallel.apply import is_experts, num_experts_of
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.low_rank import WEIGHTS
from automodel_cli.distributed.qat.formats import Format
from automodel_cli.distributed.qat.linear import QATLinear, convert_to_qat
from automodel_cli.distributed.qat.settings import FakeQuantization, LowRank
from automodel_cli.distributed.typed_torch import modules_of, set_attributes
from automodel_cli.models import conversion_compat
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import dora as lora_dora
from automodel_cli.models.lora import init as lora_init
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.models.lora.experts import compute_grouped
from automodel_cli.models.lora.layer import AdapterLayer
from automodel_cli.models.lora.targets import bypassed, shared
from automodel_cli.models.qat_config import QATConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Sibling layers that engines join into one, with one factor of nvfp4 (the rule of llm-compressor)."""


def convert_layers(model: PreTrainedModel, config: QATConfig, read_dtype: torch.dtype) -> FakeQuantization:
    """Convert the linear layers inside the decoder layers, in place. Parameters may be on the meta device.

    Raises ConfigError for experts whose export no reader has, if no layer is left to quantize, and for a name that no
    layer has.
    """
    with lora.bare(model):
        quantization = _convert_linear(model, config, read_dtype)
    for name, wrapper in lora.wrappers(model):
        _convert_adapter(name, wrapper)
    return quantization


def _convert_linear(model: PreTrainedModel, config: QATConfig, read_dtype: torch.dtype) -> FakeQuantization:
    from transformers.modeling_layers import GradientCheckpointingLayer

    if config.export == "compressed-tensors":
        install = "'automodel-cli[qat]', or model.qat.export=plain"
        require_package("compressed_tensors", "the export of model.qat", install=install, keys=("qat",))
    layers = [layer for _, layer in modules_of(model, GradientCheckpointingLayer)]
    inside = {child for layer in layers for child in layer.modules() if type(child) is nn.Linear}
    linear = dict(modules_of(model, nn.Linear))
    candidates = {name: child for name, child in linear.items() if child in inside}
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    _check_names("target_modules", config.target_modules, [*candidates, *experts])
    _check_names("exclude_modules", config.exclude_modules, [*candidates, *experts])
    # Code that reads a weight without calling its layer would see the weight before rounding.
    unread = bypassed(model) | shared(model)
    gates = _gates(candidates, experts)
    found = {name: _why_not(name, child, config, unread, gates) for name, child in candidates.items()}
    reasons = {name: reason for name, reason in found.items() if reason}
    chosen = {name: child for name, child in candidates.items() if name not in reasons}
    left = "".join(f"; not {count} {reason}" for reason, count in Counter(reasons.values()).items())
    quantized = {name: module for name, module in experts.items() if not _unselected(name, config)}
    if len(quantized) < len(experts) and config.export != "plain":
        reason = "transformers does not read unquantized experts of a quantized checkpoint, and some are not selected"
        raise _refused(reason, key="qat.export", fix="model.qat.export=plain")
    for name, module in quantized.items():
        _check_experts(model, name, module, config)
    if not chosen and not quantized:
        reason = f"{type(model).__name__} has {len(candidates)} linear layers in decoder layers{left}"
        by_default = replace(config, group_size=None)
        if all(_why_not(name, child, by_default, unread, gates) for name, child in candidates.items()):
            raise _refused(reason)
        raise _refused(reason, key="qat.group_size", fix="model.qat.group_size=null")
    weights = Format(config.weight_dtype, config.weights_per_scale)
    activations = None if config.activation_dtype == "none" else Format(config.activation_dtype)
    # Listed in the export as exceptions. Engines read all other linear layers as quantized.
    ignored = [name for name in linear if name not in chosen]
    ignored += [name for name, module in model.named_modules() if _is_router(module)]
    quantization = FakeQuantization(
        weights,
        activations,
        read_dtype=read_dtype,
        ignored=tuple(ignored),
        active=config.fake_quant_after_n_steps == 0,
        exports=config.export == "compressed-tensors",
    )
    for name, child in chosen.items():
        convert_to_qat(child, quantization, _joined(model, name, chosen))
    for module in quantized.values():
        set_attributes(module, qat=quantization)
        compute_grouped(module)
    of_experts = f" and {len(quantized)} of experts" if quantized else ""
    logger.info("qat %s: %d linear layers%s%s", config.weight_dtype, len(chosen), of_experts, left)
    return quantization


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


def _check_names(key: str, entries: list[str], names: list[str]) -> None:
    listed = NameList(f"model.qat.{key}", entries, "no linear layer's name ends in")
    check_entries(listed, lambda ending: any(ends_in(name, ending) for name in names), endings(names))


def _gates(linear: dict[str, nn.Linear], experts: dict[str, nn.Module]) -> set[str]:
    """Return the linear layers that weigh experts: engines read them unquantized."""
    counts = {name.rpartition(".")[0]: num_experts_of(module) for name, module in experts.items()}
    outputs = {name: counts.get(name.rpartition(".")[0]) for name in linear}
    return {name for name, count in outputs.items() if count and linear[name].out_features in (1, count)}


def _is_router(module: nn.Module) -> bool:
    """Return whether this is a router with its own code, which engines read as a linear layer."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Linear | nn.Embedding)


def _check_experts(model: PreTrainedModel, name: str, experts: nn.Module, config: QATConfig) -> None:
    """Raise ConfigError for experts that cannot be quantized, or whose export no reader has."""
    kind = type(experts).__name__
    if GatedExperts.of(experts, num_experts_of(experts), None) is None:
        raise _refused(f"the experts {name} ({kind}) are not measured to be gated MLPs")
    if config.weight_dtype == "nvfp4":
        reason = "transformers reads nvfp4 experts without the factor of the tensor"
        raise _refused(reason, key="qat.weight_dtype", fix="model.qat.weight_dtype=mxfp4")
    if config.activation_dtype != "none":
        reason = "the inputs of experts are not quantized"
        raise _refused(reason, key="qat.activation_dtype", fix="model.qat.activation_dtype=none")
    for leaf in WEIGHTS:
        weight = experts._parameters[leaf]
        assert weight is not None, "measured above"
        inputs, group = weight.shape[-2 if experts.is_transposed else -1], config.weights_per_scale
        if group is not None and inputs % group:
            raise _refused(f"the {inputs} inputs of {name}.{leaf} are no multiple of the group of {group} weights")
        stored = conversion_compat.revert_conversion(model, {f"{name}.{leaf}": weight})
        plain = config.export == "plain"
        if not plain and not all(key.endswith(".weight") and part.ndim == 2 for key, part in stored.items()):
            reason = f"checkpoints of {type(model).__name__} store the experts as one tensor, for which "
            reason += "compressed-tensors has no names"
            raise _refused(reason, key="qat.export", fix="model.qat.export=plain")


def _unselected(name: str, config: QATConfig) -> str:
    """Return why the config does not select a layer. Empty if it does."""
    if any(ends_in(name, ending) for ending in config.exclude_modules):
        return "excluded"
    if config.target_modules and not any(ends_in(name, ending) for ending in config.target_modules):
        return "not selected"
    return ""


def _why_not(name: str, linear: nn.Linear, config: QATConfig, unread: set[str], gates: set[str]) -> str:
    """Empty for a layer that is quantized."""
    if reason := _unselected(name, config):
        return reason
    if name in gates:
        return "that weigh experts"
    if name in unread:
        return "whose weight is shared or read by other code"
    group = config.weights_per_scale
    if group is not None and linear.in_features % group:
        return f"with {linear.in_features} inputs, no multiple of {group}"
    return ""


def _refused(reason: str, *, key: str = "qat", fix: str = "model.qat=null") -> ConfigError:
    message = f"qat is not supported because {reason}"
    return ConfigError(message, code="not_supported_by_model", keys=(key,), fix=fix)
