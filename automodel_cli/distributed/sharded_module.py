"""Interface between a training step and a part under any data-parallel strategy.

A strategy registers a `Sharded` for the part and its wrapper if it needs notifications about microbatches, new weights
or optimizer steps. For a module without one, all methods do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from automodel_cli.distributed.wgrad_fusion.linear import single_backward

_registered: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()


class Sharded:
    """Handle of a part. This base class is the handle without a strategy. The registered modules keep it alive."""

    def __init__(self, part: nn.Module):
        self._part = weakref.ref(part)

    @property
    def part(self) -> nn.Module:
        """The module with the trained parameters."""
        part = self._part()
        assert part is not None, "a handle does not outlive its part"
        return part

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Context of the forward and backward of one microbatch. After the last one, gradients are sums over ranks.

        Collective if `is_last`.
        """
        with single_backward():
            yield

    def reshard(self) -> None:
        """Free parameters gathered by a forward without backward, and restore the parameters of the optimizer."""

    @contextmanager
    def in_float32(self) -> Iterator[bool]:
        """Compute forward passes in float32 inside this context, if the strategy has another compute dtype that it can
        change.

        Yields whether it did. No backward may run inside.
        """
        yield False

    def weights_changed(self) -> None:
        """Use parameters that were changed from outside in the next forward. Collective."""

    def step_taken(self) -> None:
        """Update internal copies after an optimizer step. Collective."""


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before FSDP2 replaced it by a subclass."""
    kind = type(module)
    return next(c for c in kind.__mro__[1:] if c is not FSDPModule) if isinstance(module, FSDPModule) else kind


def register_handle(handle: Sharded, *modules: nn.Module) -> None:
    """Register `handle` for these modules."""
    for module in modules:
        _registered[module] = handle


def handle_of(module: nn.Module) -> Sharded:
    """Return the handle of a part or of its wrapper."""
    handle = _registered.get(module)
    return Sharded(module) if handle is None else handle


def weights_changed(parts: Sequence[nn.Module]) -> None:
    """Notify the strategies after parameters were loaded. Collective."""
    for part in parts:
        handle_of(part).weights_changed()


def follow_optimizer(optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module]) -> None:
    """Notify the strategy of every sharded part after each step of `optimizer`."""
    for part in parts:
        if part in _registered:
            optimizer.register_step_post_hook(lambda *_, taken=_registered[part].step_taken: taken())
