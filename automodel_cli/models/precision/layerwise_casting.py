"""A stock model whose layers are cast one at a time, each only while it runs: the peak is one layer above the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from automodel_cli.models import transformers_compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Cast:
    """First `change(name, float32 tensor)`, then a cast to `dtype`, or float32 where `keeps_float32(name)`."""

    dtype: torch.dtype
    change: Callable[[str, Tensor], Tensor] | None = None
    keeps_float32: Callable[[str], bool] | None = None

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        changed = tensor.float() if self.change is None else self.change(name, tensor.float())
        kept = self.keeps_float32 is not None and self.keeps_float32(name)
        return changed if kept else changed.to(self.dtype)


@contextmanager
def cast_layers(
    model: PreTrainedModel, cast: Cast, device: torch.device, tick: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, `model` computes on `device` with its tensors cast. What is outside of layers is cast for the whole time.
    `tick` is called before each layer."""
    names = {module: name for name, module in model.named_modules()}
    layers = _layers(model)
    of_layers = {module for layer in layers for module in layer.modules()}
    hooks = []
    outside = _CastTensors(cast, device, names)
    try:
        outside.take([module for module in model.modules() if module not in of_layers])
        for layer in layers:
            held = _CastTensors(cast, device, names)
            hooks.append(layer.register_forward_pre_hook(_taking(held, layer, tick)))
            # One layer is cast at a time: the memory is that of the largest layer, not of a second model.
            hooks.append(layer.register_forward_hook(_giving_back(held), always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        outside.give_back()


def largest_forward(model: PreTrainedModel) -> float:
    """Bytes of float32 tensors that `cast_layers` holds at most."""
    layers = _layers(model)
    of_layers = {id(param) for layer in layers for param in layer.parameters()}
    outside = sum(param.numel() for param in model.parameters() if id(param) not in of_layers)
    return 4.0 * (outside + max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost lists of modules that have parameters, each once."""
    layers: list[nn.Module] = []
    for child in model.children():
        entries = list(child) if isinstance(child, nn.ModuleList) else []
        layers += [entry for entry in entries if any(True for _ in entry.parameters())] if entries else _layers(child)
    return list(dict.fromkeys(layers))


class _CastTensors:
    """Tensors of some modules while their cast copies are in place."""

    def __init__(self, cast: Cast, device: torch.device, names: dict[nn.Module, str]):
        self._cast, self._device, self._names = cast, device, names
        self._originals: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def take(self, modules: list[nn.Module]) -> None:
        made: dict[int, Tensor] = {}  # a tied tensor stays one
        for module in modules:
            computed = set(transformers_compat.non_persistent_buffers(module))
            for store in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        self._originals.append((store, name, tensor))
                        made.setdefault(id(tensor), self._made(module, name, tensor, as_is=name in computed))
                        store[name] = made[id(tensor)]

    def _made(self, module: nn.Module, name: str, tensor: Tensor, *, as_is: bool) -> Tensor:
        value = tensor.detach().to(self._device)
        if not as_is and value.is_floating_point():
            value = self._cast(f"{self._names[module]}.{name}", value)
        return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value

    def give_back(self) -> None:
        for store, name, tensor in self._originals:
            store[name] = tensor
        self._originals.clear()


def _taking(held: _CastTensors, layer: nn.Module, tick: Callable[[], None]) -> Callable[..., None]:
    def before(module: nn.Module, args: object) -> None:
        tick()
        held.take(list(layer.modules()))

    return before


def _giving_back(held: _CastTensors) -> Callable[..., None]:
    def after(module: nn.Module, args: object, output: object) -> None:
        held.give_back()

    return after
