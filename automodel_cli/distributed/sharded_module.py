"""What a training step asks of a part under a data-parallel strategy, whichever it is.

A strategy that needs to know of microbatches, of new weights or of the optimizer's steps registers a `Sharded` for the
part and its wrapper. A module without one is plain: every question passes through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

_registered: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()


class Sharded:
    """A part under a strategy; this class itself under none. Kept alive by the modules it is registered for."""

    def __init__(self, part: nn.Module):
        self._part = weakref.ref(part)

    @property
    def part(self) -> nn.Module:
        """The module whose parameters are trained."""
        part = self._part()
        assert part is not None, "a handle does not outlive its part"
        return part

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch; after the last one of a step, gradients are sums over ranks.
        Collective when `is_last`."""
        yield

    def reshard(self) -> None:
        """Free what a forward without backward has gathered, and show the optimizer's parameters again."""

    @contextmanager
    def in_float32(self) -> Iterator[bool]:
        """Inside, forwards compute in float32 where the strategy has another compute dtype that it can change. Gives
        whether it did. No backward may run inside."""
        yield False

    def weights_changed(self) -> None:
        """Somebody wrote to the parameters: the next forward must compute with them. Collective."""

    def step_taken(self) -> None:
        """The optimizer has stepped. Collective."""


def register_handle(handle: Sharded, *modules: nn.Module) -> None:
    """Find `handle` by each of these modules from now on."""
    for module in modules:
        _registered[module] = handle


def handle_of(module: nn.Module) -> Sharded:
    """The handle of a part or of the wrapper around it."""
    found = _registered.get(module)
    return Sharded(module) if found is None else found


def weights_changed(parts: Sequence[nn.Module]) -> None:
    """To be called by whoever fills parameters (a loader, a checkpoint). Collective."""
    for part in parts:
        handle_of(part).weights_changed()


def follow_optimizer(optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module]) -> None:
    """Tell the strategy of every part that it shards of each step of `optimizer`."""
    for part in parts:
        if part in _registered:
            optimizer.register_step_post_hook(lambda *_, taken=_registered[part].step_taken: taken())
