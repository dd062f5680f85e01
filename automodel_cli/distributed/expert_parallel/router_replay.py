"""Which experts each token goes to: recorded while a model generates, and chosen again while it is trained.

A router computes gate weights for all experts and selects k of them by `topk`. What is replaced here is that one
selection: the router's own weights of the given experts are returned in its place, so everything after it (what is
normalised, scaled, learnt) is the router's as ever, and gradients flow through the gates of the given experts. Which
call of which module selects is measured for each family (`models/moe/router_hooks.py`).

`choosing` says what happens inside of it, on this thread. A layer that backward runs again is run by the choices of its
first run, whatever else is in flight then.

Shapes: B rows, T tokens, N = B*T, L layers with experts, K experts for each token.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)


class RouterDecisions(Protocol):
    """What decides which experts get a token."""

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        """int64 `[N, K]` for the tokens of one call of layer `layer`, whose router would choose `own_NK`."""
        ...

    def again(self) -> RouterDecisions:
        """The same for a layer that is run again."""
        ...


class RouterRecorder:
    """Routers choose, and it is remembered: `layers` has `[N, K]` of each layer that ran, by its number."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        self.layers[layer] = own_NK
        return own_NK

    def again(self) -> RouterRecorder:
        return self

    def stacked(self, num_tokens: int) -> Tensor:
        """int64 `[N, L', K]` of the layers that ran here, in their order; -1 where a layer takes fewer experts."""
        found = [self.layers[layer] for layer in sorted(self.layers)]
        if not found:  # a stage of a pipeline without experts
            return torch.empty(num_tokens, 0, 0, dtype=torch.int64)
        most = max(chosen.shape[-1] for chosen in found)
        return torch.stack([nn.functional.pad(x, (0, most - x.shape[-1]), value=-1) for x in found], 1)


class RouterMismatchCounter:
    """How often a router would have chosen otherwise, over tokens and layers; counted on the device."""

    def __init__(self, device: torch.device):
        self.counts_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """Choices that differ, and all of them."""

    def add(self, own_NK: Tensor, given_NK: Tensor) -> None:
        known_N = (given_NK >= 0).all(-1)
        differ_N = (own_NK.sort(-1).values != given_NK.sort(-1).values).any(-1) & known_N
        self.counts_2 += torch.stack([differ_N.sum(), known_N.sum()])


class Replay:
    """The choices of one microbatch: `experts_BTC` integers, C = L x K, of this rank's tokens; below 0 where nothing is
    known, and the router chooses."""

    def __init__(self, experts_BTC: Tensor, num_layers: int, tally: RouterMismatchCounter | None):
        self._experts_BTLK = experts_BTC.unflatten(-1, (num_layers, -1))
        self._tally = tally

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        given_NK = self._of(layer, own_NK)
        if self._tally is not None:
            self._tally.add(own_NK, given_NK)
        return torch.where(given_NK >= 0, given_NK, own_NK)

    def again(self) -> Replay:
        return Replay(self._experts_BTLK.flatten(-2), self._experts_BTLK.shape[2], None)

    def _of(self, layer: int, own_NK: Tensor) -> Tensor:
        given_BTK = self._experts_BTLK[:, :, layer, : own_NK.shape[-1]].to(own_NK.dtype)
        padding = own_NK.shape[0] // given_BTK.shape[0] - given_BTK.shape[1]  # sequence parallelism adds some to rows
        return nn.functional.pad(given_BTK, (0, 0, 0, padding), value=-1).flatten(0, 1)


class RoutedLayers(Protocol):
    """The layers with experts of a model whose choices can be replayed."""

    def replay(self, experts_BTC: Tensor, *, counts: bool) -> Replay:
        """Return the choices of one microbatch. `counts`: count what routers would have chosen."""
        ...


class _Now(threading.local):
    choices: RouterDecisions | None = None


_now = _Now()


@contextmanager
def choosing(choices: RouterDecisions | None) -> Iterator[None]:
    """Layers that run inside, on this thread, get their experts from `choices`; None: from their routers."""
    outer, _now.choices = _now.choices, choices
    try:
        yield
    finally:
        _now.choices = outer


def is_choosing() -> bool:
    """Whether somebody asks for the selection, which then has to be a call of topk."""
    return _now.choices is not None


def selects_by(module: nn.Module, layer: int, nth: int) -> None:
    """From now on `module`, whose `nth` call of topk (from 1) selects the experts of layer `layer`, asks `choosing`."""
    own = module.forward

    @torch.compiler.disable
    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _now.choices is None:
            return own(*args, **kwargs)
        with _Selection(_now.choices, layer, nth):
            return own(*args, **kwargs)

    module.forward = forward


def recomputes_alike(layer: nn.Module) -> None:
    """Where `layer` is run again in backward, it gets the choices of its first run."""
    own: Callable[..., Any] | None = getattr(layer, "_gradient_checkpointing_func", None)
    if own is None:
        return

    def checkpointed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        choices, runs = _now.choices, itertools.count()

        def bound(*args: Any, **kwargs: Any) -> Any:
            first = next(runs) == 0
            with choosing(choices if first or choices is None else choices.again()):
                return run(*args, **kwargs)

        return own(bound, *args, **kwargs)

    layer._gradient_checkpointing_func = checkpointed  # type: ignore[assignment]


class _Selection(TorchFunctionMode):
    """Around one call of a module that selects experts."""

    def __init__(self, choices: RouterDecisions, layer: int, nth: int):
        super().__init__()
        self._choices, self._layer, self._left = choices, layer, nth

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        self._left -= 1
        if self._left:
            return result
        index_NK = self._choices.choose(self._layer, result.indices)
        if index_NK is result.indices:
            return result
        scores_NE: Tensor = args[0] if args else kwargs["input"]
        return torch.return_types.topk((scores_NE.gather(-1, index_NK), index_NK))
