"""The layers that `peft` wraps, as far as this package reads them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

ADAPTER = "default"
"""The name that `peft` gives to the only adapter."""


class AdapterLayer(nn.Module):
    """Attributes of a wrapped layer, by the name of the adapter.

    Layers of `peft` have them without this base class. Own layers and forwards derive from it.
    """

    base_layer: nn.Module
    in_features: int
    out_features: int
    fan_in_fan_out: bool
    r: Mapping[str, int]
    lora_alpha: Mapping[str, int]
    use_rslora: Mapping[str, bool]
    scaling: dict[str, float]
    lora_A: MutableMapping[str, nn.Linear]
    lora_B: MutableMapping[str, nn.Linear]
    lora_embedding_A: Mapping[str, nn.Parameter]
    lora_embedding_B: Mapping[str, nn.Parameter]
    lora_dropout: Mapping[str, nn.Module]
    lora_variant: Mapping[str, object]
    disable_adapters: bool
    merged: bool
    keeps_products: bool = False
    """Whether selective checkpointing saves the results of GEMMs. A saved result must not change in place."""

    if TYPE_CHECKING:

        def get_base_layer(self) -> nn.Module: ...

        def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor: ...
