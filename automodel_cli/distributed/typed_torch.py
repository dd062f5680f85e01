"""Parts of torch without annotations, with types. They are torch's own objects at run time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode as _TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

    class Ctx(torch.autograd.function.FunctionCtx):
        """`ctx` of an autograd function, with the attributes that its forward sets."""

        saved_tensors: tuple[Any, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    class Function(torch.autograd.Function):
        """`torch.autograd.Function`."""

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any: ...

    class TorchDispatchMode(_TorchDispatchMode):
        """`torch.utils._python_dispatch.TorchDispatchMode`."""

        def __init__(self) -> None: ...

    class TorchFunctionMode(_TorchFunctionMode):
        """`torch.overrides.TorchFunctionMode`."""

        def __exit__(self, *exception: object) -> None: ...

    def disable(*, recursive: bool = True, reason: str | None = None) -> Callable[[F], F]:
        """`torch.compiler.disable`."""
else:
    Ctx, Function, disable = torch.autograd.function.FunctionCtx, torch.autograd.Function, torch.compiler.disable
    TorchDispatchMode, TorchFunctionMode = _TorchDispatchMode, _TorchFunctionMode


M = TypeVar("M", bound=nn.Module)


def modules_of(model: nn.Module, kind: type[M] | tuple[type[M], ...]) -> Iterator[tuple[str, M]]:
    """Yield name and module of every module of a class, in model order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def set_attributes(target: object, **values: object) -> None:
    """Set attributes that the annotations of torch do not know, such as our own on a module."""
    for name, value in values.items():
        setattr(target, name, value)
