"""Find the layers of a part, and prepare them for any data-parallel strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed import torch_compat
from automodel_cli.distributed.activation_checkpointing.apply import apply_activation_checkpointing
from automodel_cli.distributed.adapter_layers import is_adapter
from automodel_cli.distributed.fusion.compiled_regions import compilations


class LayerOptions(Protocol):
    """Options that concern layers, as in `ParallelizerConfig`."""

    @property
    def activation_checkpointing(self) -> bool | int | str: ...
    @property
    def autocast_dtype(self) -> str | None: ...
    @property
    def enable_compile(self) -> bool | str: ...
    @property
    def compile_backend(self) -> str: ...


def prepare_layers(model: nn.Module, config: LayerOptions, device_type: str) -> list[nn.Module]:
    """Apply activation checkpointing, compilation and autocast, before data parallelism. Returns the layers."""
    layers = transformer_layers(model)
    mode = config.activation_checkpointing
    # "selective" chooses which operators to save, so the compiler must trace the checkpoint in its graph. It cannot
    # choose from compiled code. After a graph break the compiler would silently skip the whole layer.
    full_layers = mode == "selective"
    backend = None
    if config.enable_compile is True:
        backend = torch_compat.counted_backend(config.compile_backend, functools.partial(compilations.append, "layer"))
    apply_activation_checkpointing(layers, mode, None if full_layers else backend)
    if backend is not None:
        for layer in layers:  # In place, which keeps parameter names, in contrast to torch.compile(layer).
            if full_layers or not getattr(layer, "gradient_checkpointing", False):
                layer.compile(backend=backend, fullgraph=full_layers)
    if config.autocast_dtype is not None:
        autocast = torch.autocast(device_type, getattr(torch, config.autocast_dtype))
        model.forward = autocast(model.forward)  # the whole part, whoever calls it
    return layers


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of an unmodified transformers model, in the order of `model.modules()`, without nested
    ones.

    A pipeline stage may have none. All slots of its decoder list are then without parameters.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    of_adapters = {child for module in model.modules() if is_adapter(module) for child in module.children()}
    lists = [
        module
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and module not in of_adapters
    ]
    is_empty_stage = bool(lists) and not any(True for entries in lists for _ in entries.parameters())
    if not layers and not is_empty_stage:
        raise ConfigError(
            f"{type(model).__name__} is not supported because it has no decoder layers: none of its modules is a "
            "GradientCheckpointingLayer",
            code="not_supported_by_model",
            keys=("model",),
            fix="use a model that supports gradient checkpointing in transformers",
        )
    return layers


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate every meta parameter and buffer on `device`, without values. Tied parameters stay tied."""
    # By identity (tensors hash by id), so that a tied table gets one storage.
    real: dict[Tensor, Tensor] = {}

    def storage(tensor: Tensor) -> Tensor:
        if tensor not in real:
            empty = torch.empty_like(tensor, device=device)
            real[tensor] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return real[tensor]

    for module in model.modules():
        for tensors in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = storage(tensor)


def swap_parameters(module: nn.Module, swap: Callable[[Tensor], Tensor]) -> None:
    """Run the forward of the module with `swap(parameter)` in place of each parameter that it owns."""
    forward = module.forward

    def swapped(*args: object, **kwargs: object) -> object:
        own = {name: param for name, param in module._parameters.items() if param is not None}
        try:
            for name, param in own.items():
                module._parameters[name] = swap(param)  # type: ignore[assignment]  # a tensor of this graph
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = swapped
