"""Which modules of a model read other tokens by themselves, measured on a tiny copy of it.

The copy runs on a row in which every token is a document, so attention that goes through the library's interface shows
a token nothing but itself. Any module whose result at a token then still changes with an earlier token mixes tokens on
its own: a recurrence, a convolution, linear attention, or attention that the boundaries do not reach. No names are
read.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel import is_experts
from automodel_cli.models import compat, state_layers
from automodel_cli.models.attention import PACKED, register
from automodel_cli.models.context import Context, OneProcess
from automodel_cli.models.part import accepted_by
from automodel_cli.models.shrink import VOCAB, build_small, shrink

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TOKENS = 26  # no other size of a copy: a tensor of that many rows holds tokens; even, as `Context` has them
_TOLERANCE = 1e-5  # of the largest value; sums in another order give 1e-7, a state 1e-3 and more


def state_layer_classes(
    hf_config: PretrainedConfig, *, attention: str = PACKED, trust_remote_code: bool = False
) -> frozenset[str]:
    """Classes (`state_layers.class_name`) of the modules that must be run document by document under this attention.

    Any attention but packed is the library's, and is shown documents by the library's masks as far as it looks at them.
    None for a config that cannot be built small: what cannot be measured is for the packing probe to refuse.
    """
    try:
        small = shrink(hf_config)
        key = small.to_json_string(use_diff=False)
    except Exception:  # any family may refuse sizes it never saw
        return frozenset()
    return _measured(_Hashed(key, small, trust_remote_code), PACKED if attention == PACKED else "eager")


def new_cache(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """An empty cache of the class that this family's model makes for itself when it is asked to use one: seen on a tiny
    copy of it."""
    small = shrink(hf_config)
    cls = _cache_class(_Hashed(small.to_json_string(use_diff=False), small, trust_remote_code))
    return cls(config=hf_config) if "config" in inspect.signature(cls).parameters else cls()


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _cache_class(small: _Hashed) -> type:
    from transformers import Cache, DynamicCache

    def build(config: PretrainedConfig) -> PreTrainedModel:
        return compat.causal_lm(config, dtype=torch.float32, trust_remote_code=small.trust)

    token_11 = torch.full((1, 1), 3)
    try:
        with compat.quiet():
            model: Any = build_small(small.config, build).eval().base_model
            output = model(input_ids=token_11, position_ids=torch.zeros_like(token_11), use_cache=True)
        return next(type(value) for value in output.values() if isinstance(value, Cache))
    except Exception:  # the library's own caching fails for some configs (a Bamba without attention)
        return DynamicCache


class _Hashed:
    """A config as the key of a cache, by what it says."""

    def __init__(self, key: str, config: PretrainedConfig, trust: bool):
        self.key, self.config, self.trust = (key, type(config), trust), config, trust

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.key == other.key


@functools.lru_cache(maxsize=64)
def _measured(small: _Hashed, attention: str) -> frozenset[str]:
    register()

    def build(config: PretrainedConfig) -> PreTrainedModel:
        return compat.causal_lm(config, attention=attention, dtype=torch.float32, trust_remote_code=small.trust)

    try:
        with compat.quiet():
            return frozenset(_Observed(build_small(small.config, build)).classes())
    except Exception:
        return frozenset()


class _Observed:
    """What each module of a model was called with on the row."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel):
        self.model = model.eval()
        self.calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        handles = [
            module.register_forward_hook(self._remember, with_kwargs=True) for module in model.base_model.modules()
        ]
        ids_BT = torch.randint(3, VOCAB, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        bounds = torch.arange(_TOKENS + 1)
        # As a context, which only attention reads: some families refuse boundaries where their kernels are missing.
        context = Context(OneProcess(), (1, _TOKENS), bounds, ids_BT.device)
        inputs = context.local_inputs(ids_BT, torch.zeros_like(ids_BT))
        self.documents = state_layers.Documents(1, _TOKENS, tuple(bounds.tolist()), ids_BT.device)
        try:
            model.base_model(**accepted_by(model, inputs), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.calls.setdefault(module, (args, kwargs))

    @torch.no_grad()
    def classes(self) -> set[str]:
        slots = state_layers.decoder_slots(self.model)
        return {state_layers.class_name(module) for slot in slots for module in self._isolated(slot)}

    def _isolated(self, module: nn.Module) -> list[nn.Module]:
        """Run per document from now on, and give, what in here mixes tokens: the innermost modules that explain it."""
        candidate = self._is_candidate(module)
        if candidate and not self._mixes(module):
            return []
        within = [found for child in module.children() for found in self._isolated(child)]
        if not candidate or not self._mixes(module):
            return within
        state_layers.hand_over(within, None)
        if any(is_experts(inner) for inner in module.modules()):
            return []  # experts may be dispatched between ranks, which must all call them equally often
        state_layers.as_state_layer(module)
        state_layers.hand_over([module], self.documents)
        return [module]

    def _is_candidate(self, module: nn.Module) -> bool:
        """Called with tokens, and with nothing that belongs to more than one of them."""
        if module not in self.calls:
            return False
        tensors = list(state_layers.tensors_in(self.calls[module]))
        return bool(tensors) and tensors[0].dim() == 3 and all(_is_of_tokens(x) for x in tensors)

    def _mixes(self, module: nn.Module) -> bool:
        args, kwargs = self.calls[module]
        before = _first(module(*args, **kwargs))
        if any(isinstance(value, Tensor) for value in args):
            after = _first(module(*_first_changed(dict(enumerate(args))).values(), **kwargs))
        else:
            after = _first(module(*args, **_first_changed(kwargs)))
        if before is None or after is None or before.shape[:2] != (1, _TOKENS):
            return False
        later, scale = (after - before)[:, 1:].abs().max().item(), before.abs().max().item()
        return not later <= _TOLERANCE * max(scale, 1e-6)


def _is_of_tokens(x: Tensor) -> bool:
    return x.dim() == 0 or state_layers.is_per_token(x, 1, _TOKENS)


def _first(output: Any) -> Tensor | None:
    return next(state_layers.tensors_in(output), None)


def _first_changed(values: dict[Any, Any]) -> dict[Any, Any]:
    """The same arguments, the first token of the hidden states being another."""
    named = values.get("hidden_states")
    name = next(key for key, value in values.items() if value is named or (named is None and isinstance(value, Tensor)))
    changed: Tensor = values[name].clone()
    changed[:, 0] = 3 * changed[:, 0].flip(-1) + 1
    return {**values, name: changed}
