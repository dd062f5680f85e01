"""Merges of adapters into their weights: `W + scale * B @ A`, with rescaled rows in DoRA, without code of `peft`."""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_cli.models.lora import dora as lora_dora
from automodel_cli.models.lora import init as lora_init
from automodel_cli.models.lora import targets as lora_targets
from automodel_cli.models.lora import tokens as lora_tokens
from automodel_cli.models.lora.layer import ADAPTER, AdapterLayer
from automodel_cli.models.precision.stochastic_rounding import round_stochastically


def scale(layer: AdapterLayer) -> float:
    """Return the scale of B @ A in a wrapped layer."""
    factor: float = layer.scaling[ADAPTER]
    return factor


def factors(layer: AdapterLayer) -> tuple[Tensor, Tensor, float]:
    """Return full A `[R, I]` and B `[O, R]`, and the scale of their product. Collective if adapters are sharded."""
    return *lora_init.joined(layer), scale(layer)


def delta(layer: AdapterLayer) -> Tensor:
    """Return the full fp32 update of a wrapped layer. Collective if adapters are sharded."""
    a, b, factor = factors(layer)
    # (O, R) x (R, I) -> (O, I).
    update = (b.float() @ a.float()) * factor
    return update.T if lora_targets.is_transposed(layer) else update


def merged_weight(weight: Tensor, layer: AdapterLayer) -> Tensor:
    """Return a layer's full `weight` with its adapter, in fp32. Collective if adapters are sharded."""
    if isinstance(layer, lora_tokens.TokenRows):
        return lora_tokens.merged(weight, layer)
    # In float32, rounded once by the caller. A sum in bfloat16 would round the update to the weight's last place.
    merged = weight.float() + delta(layer)
    return lora_dora.rescaled(merged, layer) if lora_dora.has_magnitude(layer) else merged


def rounded(name: str, merge: Tensor, dtype: torch.dtype) -> Tensor:
    """A trained weight or a merge in `dtype`, up or down at random in 16 bits, so that its mean stays.

    An update is often below half a unit in the last place of its weight. Rounding to the nearest value drops it: half
    of the training in a short bfloat16 run. The random numbers depend on `name` only.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return merge.to(dtype)
    return round_stochastically(f"{name} merged", merge, dtype)
