"""Record the experts of each token during generation, and select the same experts in training.

A router computes gate weights for all experts and selects K of them with `topk`. Replay replaces the result of this one
call with the recorded experts and the router's own weights for them. Normalization, scaling and gradients are
unchanged, and gradients flow through the gates of the recorded experts. `models/moe/router_hooks.py` measures which
call of topk selects the experts.

`choosing` activates a source of decisions for the current thread. If activation checkpointing recomputes a layer, the
layer repeats the decisions of its first run.

Shapes: B sequences, T tokens, N = B * T, L layers with experts, K experts per token, C = L * K.
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

from automodel_cli.distributed.typed_torch import TorchFunctionMode, disable, set_attributes

_TOPK = (torch.topk, torch.Tensor.topk)


class RouterDecisions(Protocol):
    """Source of expert selections."""

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        """Return the experts of the tokens in one call, int64 `[N, K]`.

        Args:
            layer: index among the layers with experts.
            own_NK: experts that the router would select.
        """
        ...

    def again(self) -> RouterDecisions:
        """Return the source for a layer that is recomputed."""
        ...


class RouterRecorder:
    """Record the selections of the routers. `layers` maps the index of a layer to `[N, K]`."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        self.layers[layer] = own_NK
        return own_NK

    def again(self) -> RouterRecorder:
        return self

    def stacked(self, num_tokens: int) -> Tensor:
        """Return the recorded experts of the local layers in order, int64 `[N, L', K]`. Padded with -1 if layers differ
        in K.
        """
        layers = [self.layers[layer] for layer in sorted(self.layers)]
        if not layers:  # A pipeline stage without experts.
            return torch.empty(num_tokens, 0, 0, dtype=torch.int64)
        most = max(chosen.shape[-1] for chosen in layers)
        return torch.stack([nn.functional.pad(x, (0, most - x.shape[-1]), value=-1) for x in layers], 1)


class RouterMismatchCounter:
    """Count how often routers would select other experts, over tokens and layers, on the device."""

    def __init__(self, device: torch.device):
        self.counts_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """Number of selections that differ, and number of all selections."""

    def add(self, own_NK: Tensor, given_NK: Tensor) -> None:
        # The same set in another order is no mismatch: [3, 1] equals [1, 3] after sorting.
        known_N = (given_NK >= 0).all(-1)
        differ_N = (own_NK.sort(-1).values != given_NK.sort(-1).values).any(-1) & known_N
        # On the device, without synchronization. Float64 counts exactly up to 2^53.
        self.counts_2 += torch.stack([differ_N.sum(), known_N.sum()])


class Replay:
    """Recorded selections of one microbatch.

    Args:
        experts_BTC: recorded experts of the local tokens. Negative entries are unknown, and the router selects.
        num_layers: layers with experts, L.
        tally: counts mismatches, if set.
    """

    def __init__(self, experts_BTC: Tensor, num_layers: int, tally: RouterMismatchCounter | None):
        self._experts_BTLK = experts_BTC.unflatten(-1, (num_layers, -1))
        self._tally = tally

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        # -1 leaves the choice to the router, for example at padding.
        given_NK = self._of(layer, own_NK)
        if self._tally is not None:
            self._tally.add(own_NK, given_NK)
        # given [[2, 5], [-1, -1]] and own [[2, 4], [0, 1]] give [[2, 5], [0, 1]].
        return torch.where(given_NK >= 0, given_NK, own_NK)

    def again(self) -> Replay:
        # Without the tally: a recomputed layer would be counted twice.
        return Replay(self._experts_BTLK.flatten(-2), self._experts_BTLK.shape[2], None)

    def _of(self, layer: int, own_NK: Tensor) -> Tensor:
        # [B, T, L, K] -> [B, T, K] of this layer -> [B * T, K]. Layers with fewer experts per token are padded with -1
        # at the end.
        given_BTK = self._experts_BTLK[:, :, layer, : own_NK.shape[-1]].to(own_NK.dtype)
        padding = own_NK.shape[0] // given_BTK.shape[0] - given_BTK.shape[1]  # Sequence parallelism may pad sequences.
        return nn.functional.pad(given_BTK, (0, 0, 0, padding), value=-1).flatten(0, 1)


class RoutedLayers(Protocol):
    """The layers with experts of a model whose selections can be replayed."""

    def replay(self, experts_BTC: Tensor, *, counts: bool) -> Replay:
        """Return the selections of one microbatch. `counts`: count how often routers would select other experts."""
        ...


# Per thread, because autograd recomputes layers on threads of its own.
class _Now(threading.local):
    choices: RouterDecisions | None = None


_now = _Now()


@contextmanager
def choosing(choices: RouterDecisions | None) -> Iterator[None]:
    """Use `choices` in layers that run inside this context, on this thread. None: use the routers."""
    outer, _now.choices = _now.choices, choices
    try:
        yield
    finally:
        _now.choices = outer


def is_choosing() -> bool:
    """Return whether a source is active. Selection must call `topk` then."""
    return _now.choices is not None


def selects_by(module: nn.Module, layer: int, nth: int) -> None:
    """Let `module` take the experts of layer `layer` from the active source.

    Args:
        nth: the call of topk in its forward, counted from 1, that selects the experts.
    """
    own = module.forward

    @disable()
    @functools.wraps(own)
    def forward(*args: object, **kwargs: object) -> object:
        if _now.choices is None:
            return own(*args, **kwargs)
        with _Selection(_now.choices, layer, nth):
            return own(*args, **kwargs)

    module.forward = forward


def recomputes_alike(layer: nn.Module) -> None:
    """Repeat the selections of the first run if activation checkpointing recomputes `layer`."""
    own: Callable[..., object] | None = getattr(layer, "_gradient_checkpointing_func", None)
    if own is None:
        return

    def checkpointed(run: Callable[..., object], *args: object, **kwargs: object) -> object:
        # Captured during the forward. In backward, recomputation runs outside the `choosing` context of the forward.
        choices, runs = _now.choices, itertools.count()

        def bound(*args: object, **kwargs: object) -> object:
            # The first run is the forward, later runs are recomputation in backward. They must select the same experts.
            first = next(runs) == 0
            with choosing(choices if first or choices is None else choices.again()):
                return run(*args, **kwargs)

        return own(bound, *args, **kwargs)

    set_attributes(layer, _gradient_checkpointing_func=checkpointed)


class _Selection(TorchFunctionMode):
    """Torch function mode around one call of a module that selects experts."""

    def __init__(self, choices: RouterDecisions, layer: int, nth: int):
        super().__init__()
        self._choices, self._layer, self._left = choices, layer, nth

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        self._left -= 1
        if self._left:
            return result
        index_NK = self._choices.choose(self._layer, result.indices)
        if index_NK is result.indices:
            return result
        # The module continues with the scores of the replayed experts, so that routing weights keep their gradient.
        scores_NE: Tensor = args[0] if args else (kwargs or {})["input"]
        return torch.return_types.topk((scores_NE.gather(-1, index_NK), index_NK))
