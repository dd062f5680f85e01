"""Which linear layers of a model multiply in 8-bit floats: those of its layers that tensor cores can take.

Never the head, embeddings, routers and norms, nor what a family computes with a class of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel import is_experts
from automodel_cli.distributed.fp8 import MULTIPLE, RECIPES, Arithmetic
from automodel_cli.distributed.fp8_linear import convert
from automodel_cli.models.config import Fp8Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def convert_layers(model: PreTrainedModel, config: Fp8Config) -> None:
    """Convert the linear layers inside the decoder layers, in place, before adapters wrap them. Parameters may be on
    the meta device.

    Raises ConfigError where nothing is left to convert, and for a name in `skip` that no linear layer has.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {child for layer in layers for child in layer.modules() if type(child) is nn.Linear}
    linear = {name: module for name, module in model.named_modules() if module in inside}
    arithmetic = Arithmetic(RECIPES[config.recipe], config.emulate)
    _check_skipped(config, linear)
    reasons = {name: reason for name, module in linear.items() if (reason := _why_not(model, name, module, config))}
    for name, module in linear.items():
        if name not in reasons:
            assert isinstance(module, nn.Linear)
            convert(module, arithmetic)
    left = "".join(f"; not {count} {reason}" for reason, count in Counter(reasons.values()).items())
    logger.info("fp8 %s: %d linear layers%s", config.recipe, len(linear) - len(reasons), left)
    if len(linear) == len(reasons):
        raise ConfigError(
            f"model.fp8 converts no layer of {type(model).__name__}, which has {len(linear)} linear layers inside its "
            f"layers{left}",
            keys=("fp8",),
            fix="model.fp8=null",
        )


def _check_skipped(config: Fp8Config, linear: dict[str, nn.Module]) -> None:
    unknown = [ending for ending in config.skip if not any(_ends(name, ending) for name in linear)]
    if unknown and linear:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"fp8.skip names {unknown[0]!r}, which no linear layer's name ends in: {names}",
            keys=("fp8.skip",),
            fix="model.fp8.skip=[]",
        )


def _why_not(model: nn.Module, name: str, module: nn.Module, config: Fp8Config) -> str:
    """Empty for a layer that is converted."""
    assert isinstance(module, nn.Linear)
    if any(_ends(name, ending) for ending in config.skip):
        return "skipped"
    siblings = model.get_submodule(name.rpartition(".")[0]).children()
    counts = [child.num_experts for child in siblings if is_experts(child)]
    if module.out_features in counts:
        return "routers"
    if any(size % MULTIPLE for size in (module.in_features, module.out_features)):
        return f"of {module.in_features} x {module.out_features}, no multiples of {MULTIPLE}"
    return ""


def _ends(name: str, ending: str) -> bool:
    return f".{name}".endswith(f".{ending}")
