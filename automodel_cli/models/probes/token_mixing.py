"""Which modules of a model read other tokens by themselves, measured on a tiny copy of it.

The copy runs on a row in which every token is a document, so attention that goes through the library's interface shows
a token nothing but itself. Any module whose result at a token then still changes with an earlier token mixes tokens on
its own: a recurrence, a convolution, linear attention, or attention that the boundaries do not reach. No names are
read.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention.packed import PACKED, register_packed_attention
from automodel_cli.models.context_parallel_layout import Context, OneProcess
from automodel_cli.models.document_masking import recurrent_layers
from automodel_cli.models.model_inputs import accepted_by
from automodel_cli.models.probes.tiny_model import VOCAB, build_small, shrink

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
        small = SmallConfig(hf_config, trust_remote_code)
    except Exception:  # any family may refuse sizes it never saw
        return frozenset()
    return _measured(small, PACKED if attention == PACKED else "eager")


def new_cache(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """An empty cache of the class that this family's model makes for itself when it is asked to use one: seen on a tiny
    copy of it."""
    cls = _cache_class(SmallConfig(hf_config, trust_remote_code))
    return cls(config=hf_config) if "config" in inspect.signature(cls).parameters else cls()


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _cache_class(small: SmallConfig) -> type:
    from transformers import Cache, DynamicCache

    token_11 = torch.full((1, 1), 3)
    try:
        with transformers_compat.quiet():
            model: Any = small.build("eager").eval().base_model
            output = model(input_ids=token_11, position_ids=torch.zeros_like(token_11), use_cache=True)
        return next(type(value) for value in output.values() if isinstance(value, Cache))
    except Exception:  # the library's own caching fails for some configs (a Bamba without attention)
        return DynamicCache


class SmallConfig:
    """A small copy of a config, as the key of a cache by what the config says. Raises what the family raises."""

    def __init__(self, hf_config: PretrainedConfig, trust_remote_code: bool = False):
        self.config, self.trust = shrink(hf_config), trust_remote_code
        self.dropout = dropout_of(hf_config)
        named = copy.deepcopy(self.config)
        named.dtype = None  # copies compute in float32
        if not trust_remote_code:
            named.name_or_path = ""  # where it was read from; with remote code, the code
        said = (named.to_json_string(use_diff=False), *self.dropout.items())
        self._key = (said, type(hf_config), trust_remote_code)

    def build(self, attention: str, dropout: bool = False) -> PreTrainedModel:
        """A model in fp32 on this attention, with the config's dropout or none."""
        register_packed_attention()
        config = copy.deepcopy(self.config)
        if dropout:
            config.get_text_config().update(self.dropout)

        def causal_lm(config: PretrainedConfig) -> PreTrainedModel:
            return transformers_compat.causal_lm(
                config, attention=attention, dtype=torch.float32, trust_remote_code=self.trust
            )

        with transformers_compat.quiet():
            return build_small(config, causal_lm)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SmallConfig) and self._key == other._key


def dropout_of(hf_config: PretrainedConfig) -> dict[str, float]:
    """The dropout of a config, which copies that are compared must do without."""
    fields = vars(hf_config.get_text_config())
    return {name: value for name, value in fields.items() if "drop" in name and isinstance(value, float) and value > 0}


@functools.lru_cache(maxsize=64)
def _measured(small: SmallConfig, attention: str) -> frozenset[str]:
    try:
        return classes_in(small.build(attention))
    except Exception:
        return frozenset()


def classes_in(model: PreTrainedModel, *, by_position: bool = False) -> frozenset[str]:
    """Of a tiny model, which is changed. `by_position`: it is to build the masks of whole rows, so that all of its
    attention is among them (`state_layers.Documents`)."""
    with transformers_compat.quiet():
        return frozenset(_Observed(model, by_position).classes())


class _Observed:
    """What each module of a model was called with on the row."""

    def __init__(self, model: PreTrainedModel, by_position: bool):
        self.model, self.by_position = model.eval(), by_position
        ids_BT = torch.randint(3, VOCAB, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        bounds = torch.arange(_TOKENS + 1)
        # As a context, which only attention reads: some families refuse boundaries where their kernels are missing.
        context = Context(OneProcess(), (1, _TOKENS), bounds, ids_BT.device)
        inputs = context.local_inputs(ids_BT, torch.zeros_like(ids_BT))
        self.inputs = recurrent_layers.told_of_rows(inputs) if by_position else accepted_by(model, inputs)
        self.documents = recurrent_layers.DocumentBounds(
            1, _TOKENS, tuple(bounds.tolist()), ids_BT.device, by_position=by_position
        )
        self._observe()

    @torch.no_grad()
    def _observe(self) -> None:
        self.calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        modules = self.model.base_model.modules()
        handles = [module.register_forward_hook(self._remember, with_kwargs=True) for module in modules]
        try:
            self.model.base_model(**self.inputs, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.calls.setdefault(module, (args, kwargs))

    @torch.no_grad()
    def classes(self) -> set[str]:
        found: set[str] = set()
        for slot in list(recurrent_layers.decoder_slots(self.model)):
            new = {recurrent_layers.class_name(module) for module in self._isolated(slot)}
            if new - found:
                found |= new
                self._isolate(found)
        return found

    def _isolate(self, classes: set[str]) -> None:
        """Run all modules of these classes per document, and see what later layers are then called with: some are
        handed more than hidden states."""
        for slot in recurrent_layers.decoder_slots(self.model):
            modules = recurrent_layers.outermost(slot, classes)
            for module in modules:
                if not isinstance(module, recurrent_layers.StateLayer):
                    recurrent_layers.as_state_layer(module)
            recurrent_layers.hand_over(modules, self.documents)
        self._observe()

    def _isolated(self, module: nn.Module) -> list[nn.Module]:
        """Run per document from now on, and give, what in here mixes tokens: the innermost modules that explain it."""
        candidate = self._is_candidate(module)
        if candidate and not self._mixes(module):
            return []
        within = [found for child in module.children() for found in self._isolated(child)]
        if not candidate or not self._mixes(module):
            return within
        recurrent_layers.hand_over(within, None)
        if any(is_experts(inner) for inner in module.modules()):
            return []  # experts may be dispatched between ranks, which must all call them equally often
        recurrent_layers.as_state_layer(module)
        recurrent_layers.hand_over([module], self.documents)
        return [module]

    def _is_candidate(self, module: nn.Module) -> bool:
        """Called with tokens, and with nothing that belongs to more than one of them."""
        if module not in self.calls:
            return False
        tensors = list(recurrent_layers.tensors_in(self.calls[module]))
        if not tensors or tensors[0].dim() != 3 or not _is_of_tokens(tensors[0]):
            return False
        return all(
            _is_of_tokens(x) or (self.by_position and recurrent_layers.is_by_position(x, _TOKENS)) for x in tensors
        )

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
    return x.dim() == 0 or recurrent_layers.is_per_token(x, 1, _TOKENS)


def _first(output: Any) -> Tensor | None:
    return next(recurrent_layers.tensors_in(output), None)


def _first_changed(values: dict[Any, Any]) -> dict[Any, Any]:
    """The same arguments, the first token of the hidden states being another."""
    named = values.get("hidden_states")
    name = next(key for key, value in values.items() if value is named or (named is None and isinstance(value, Tensor)))
    changed: Tensor = values[name].clone()
    changed[:, 0] = 3 * changed[:, 0].flip(-1) + 1
    return {**values, name: changed}
