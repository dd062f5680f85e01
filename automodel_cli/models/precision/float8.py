"""Select the linear layers and experts that compute in float8: those of decoder layers whose sizes tensor cores
support.

Excluded are the head, embeddings, routers, norms, and modules that a family computes with its own class.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import NameList, check_entries, endings, ends_in
from automodel_cli.distributed.expert_parallel.apply import experts_modules, is_experts, num_experts_of
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.float8 import grouped_gemm
from automodel_cli.distributed.float8.linear import convert_to_float8
from automodel_cli.distributed.float8.quantization import MULTIPLE, RECIPES, Arithmetic
from automodel_cli.distributed.typed_torch import modules_of, set_attributes
from automodel_cli.models.fp8_config import Fp8Config
from automodel_cli.models.moe_config import MoEConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def convert_layers(model: PreTrainedModel, config: Fp8Config, moe: MoEConfig) -> None:
    """Convert the linear layers inside the decoder layers, in place, before adapters wrap them, and mark the experts,
    which are converted when they are placed on ranks. Parameters may be on the meta device.

    Raises ConfigError if no layer is left to convert, and for a name in `skip` that no linear layer has.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for _, layer in modules_of(model, GradientCheckpointingLayer)]
    inside = {child for layer in layers for child in layer.modules() if type(child) is nn.Linear}
    linear = {name: module for name, module in modules_of(model, nn.Linear) if module in inside}
    arithmetic = Arithmetic(RECIPES[config.recipe], config.emulate)
    _check_skipped(config, linear)
    reasons = {name: reason for name, module in linear.items() if (reason := _why_not(model, name, module, config))}
    for name, module in linear.items():
        if name not in reasons:
            convert_to_float8(module, arithmetic)
    left = "".join(f"; not {count} {reason}" for reason, count in Counter(reasons.values()).items())
    num_experts, of_experts = _mark_experts(model, config, moe, arithmetic)
    logger.info("fp8 %s: %d linear layers%s%s", config.recipe, len(linear) - len(reasons), left, of_experts)
    if len(linear) == len(reasons) and not num_experts:
        raise ConfigError(
            f"fp8 is not supported because no layer of {type(model).__name__} can be converted. Its layers contain "
            f"{len(linear)} linear layers{left}",
            code="not_supported_by_model",
            keys=("fp8",),
            fix="model.fp8=null",
        )


def _mark_experts(model: PreTrainedModel, config: Fp8Config, moe: MoEConfig, arithmetic: Arithmetic) -> tuple[int, str]:
    """Return the number of layers with converted experts and its log line, which is empty for a model without
    experts."""
    modules = experts_modules(model)
    if not modules:
        return 0, ""
    # all of a class are equal: their common part is converted
    reasons = {kind: _why_not_experts(next(m for m in modules if type(m) is kind), config, moe, arithmetic)
               for kind in {type(module) for module in modules}}  # fmt: skip
    for module in modules:
        if not reasons[type(module)]:
            set_attributes(module, fp8=arithmetic)
    left = Counter(reasons[type(module)] for module in modules)
    converted = left.pop("", 0)
    parts = [f"the experts of {converted} layers"] if converted else []
    return converted, "; " + ", ".join(parts + [f"not those of {count}: {reason}" for reason, count in left.items()])


def _why_not_experts(experts: nn.Module, config: Fp8Config, moe: MoEConfig, arithmetic: Arithmetic) -> str:
    """Empty for experts that are converted."""
    sizes = {size for param in experts.parameters() if param.ndim > 2 for size in param.shape[1:]}
    if not config.experts:
        return "fp8.experts is false"
    if lacking := grouped_gemm.why_unsupported(arithmetic.recipe):
        return lacking
    if moe.experts_implementation != MoEConfig.experts_implementation:
        return f"model.moe.experts_implementation={moe.experts_implementation} multiplies them"
    if any(size % MULTIPLE for size in sizes):
        return f"sizes of {', '.join(map(str, sorted(sizes)))}, not all multiples of {MULTIPLE}"
    if GatedExperts.of(experts, num_experts_of(experts), None) is None:
        return "a computation of their own"
    return ""


def _check_skipped(config: Fp8Config, linear: dict[str, nn.Linear]) -> None:
    if linear:
        listed = NameList("model.fp8.exclude_modules", config.exclude_modules, "no linear layer's name ends in")
        check_entries(listed, lambda ending: any(ends_in(name, ending) for name in linear), endings(linear))


def _why_not(model: nn.Module, name: str, module: nn.Linear, config: Fp8Config) -> str:
    """Empty for a layer that is converted."""
    if any(ends_in(name, ending) for ending in config.exclude_modules):
        return "skipped"
    siblings = model.get_submodule(name.rpartition(".")[0]).children()
    counts = [child.num_experts for child in siblings if is_experts(child)]
    if module.out_features in counts:
        return "routers"
    multiple = RECIPES[config.recipe].multiple
    if any(size % multiple for size in (module.in_features, module.out_features)):
        return f"of {module.in_features} x {module.out_features}, no multiples of {multiple}"
    return ""
