"""Detects modules that mix tokens by themselves, on a tiny copy of the model.

In the test row, every token is a document of its own. Attention through the interface of transformers then sees one
token only. A module mixes tokens by itself if its output at a token still changes with an earlier token: recurrences,
convolutions, linear attention, or attention without document boundaries. Names are not used.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention.packed import PACKED, register_packed_attention
from automodel_cli.models.context_parallel_layout import Context, OneProcess
from automodel_cli.models.document_masking import document_bounds, recurrent_layers
from automodel_cli.models.model_inputs import accepted_by
from automodel_cli.models.probes.small_sizes import VOCAB
from automodel_cli.models.probes.tiny_model import build_small, shrink

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

_TOKENS = 26  # even, and no other dimension of a tiny copy has this size, so it identifies tokens
_TOLERANCE = 1e-5  # relative to the largest value. Rounding is 1e-7, a state at least 1e-3.


def state_layer_classes(
    hf_config: PretrainedConfig, *, attention: str = PACKED, trust_remote_code: bool = False
) -> frozenset[str]:
    """Return the classes (`recurrent_layers.class_name`) that must run document by document with this attention.

    Attention other than packed is that of transformers, which applies its own masks. Returns an empty set if no tiny
    copy can be built. The packing probe reports that case.
    """
    try:
        small = SmallConfig(hf_config, trust_remote_code)
    except Exception:  # families may reject unusual sizes
        return frozenset()
    return _measured(small, PACKED if attention == PACKED else "eager")


def new_cache(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> Cache:
    """Return an empty cache of the class that this family's model creates, measured on a tiny copy."""
    cls = _cache_class(SmallConfig(hf_config, trust_remote_code))
    cache: Cache = cls(config=hf_config) if "config" in inspect.signature(cls).parameters else cls()
    return cache


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _cache_class(small: SmallConfig) -> type:
    from transformers import Cache, DynamicCache

    token_11 = torch.full((1, 1), 3)
    try:
        with transformers_compat.quiet():
            model = small.build("eager").eval().base_model
            output = model(input_ids=token_11, position_ids=torch.zeros_like(token_11), use_cache=True)
        return next(type(value) for value in output.values() if isinstance(value, Cache))
    except Exception:  # caching in transformers fails for some configs (Bamba without attention)
        return DynamicCache


class SmallConfig:
    """A tiny copy of a config, hashable by content. Raises the errors of the family."""

    def __init__(self, hf_config: PretrainedConfig, trust_remote_code: bool = False):
        self.config, self.trust = shrink(hf_config), trust_remote_code
        self.dropout = dropout_of(hf_config)
        named = copy.deepcopy(self.config)
        named.dtype = None  # copies compute in float32
        if not trust_remote_code:
            named.name_or_path = ""  # the path of the config; with remote code, of the code
        content = (named.to_json_string(use_diff=False), *self.dropout.items())
        self._key = (content, type(hf_config), trust_remote_code)

    def build(self, attention: str, dropout: bool = False) -> PreTrainedModel:
        """Build an fp32 model with this attention, with the dropout of the config or none."""
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
    """Return the dropout fields of a config. Copies that are compared run without dropout."""
    fields = vars(hf_config.get_text_config())
    return {name: value for name, value in fields.items() if "drop" in name and isinstance(value, float) and value > 0}


@functools.lru_cache(maxsize=64)
def _measured(small: SmallConfig, attention: str) -> frozenset[str]:
    try:
        return classes_in(small.build(attention))
    except Exception:
        return frozenset()


def classes_in(model: PreTrainedModel, *, by_position: bool = False) -> frozenset[str]:
    """Return the classes of a tiny model, which is changed.

    `by_position`: the model builds masks of full rows, so that all of its attention is included
    (`document_bounds.DocumentBounds`).
    """
    with transformers_compat.quiet():
        return frozenset(_Observed(model, by_position).classes())


class _Observed:
    """Records the arguments of each module of a model on the test row."""

    def __init__(self, model: PreTrainedModel, by_position: bool):
        self.model, self.by_position = model.eval(), by_position
        ids_BT = torch.randint(3, VOCAB, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        bounds = torch.arange(_TOKENS + 1)
        # Pass boundaries as a context, which only attention reads. Some families reject boundaries without kernels.
        context = Context(OneProcess(), (1, _TOKENS), bounds, ids_BT.device)
        inputs = context.local_inputs(ids_BT, torch.zeros_like(ids_BT))
        self.inputs = recurrent_layers.full_row_inputs(inputs) if by_position else accepted_by(model, inputs)
        self.documents = document_bounds.DocumentBounds(
            1, _TOKENS, tuple(bounds.tolist()), ids_BT.device, by_position=by_position
        )
        self._observe()

    @torch.no_grad()
    def _observe(self) -> None:
        self.calls: dict[nn.Module, tuple[tuple[object, ...], dict[str, object]]] = {}
        modules = self.model.base_model.modules()
        handles = [module.register_forward_hook(self._remember, with_kwargs=True) for module in modules]
        try:
            self.model.base_model(**self.inputs, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    def _remember(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        self.calls.setdefault(module, (args, kwargs))

    @torch.no_grad()
    def classes(self) -> set[str]:
        names: set[str] = set()
        for slot in list(recurrent_layers.decoder_slots(self.model)):
            new = {recurrent_layers.class_name(module) for module in self._isolate_mixers(slot)}
            if new - names:
                names |= new
                self._isolate(names)
        return names

    def _isolate(self, classes: set[str]) -> None:
        """Run all modules of these classes per document and record the arguments of later layers again.

        Some layers receive more than hidden states.
        """
        for slot in recurrent_layers.decoder_slots(self.model):
            modules = recurrent_layers.outermost(slot, classes)
            for module in modules:
                if not isinstance(module, recurrent_layers.StateLayer):
                    recurrent_layers.as_state_layer(module)
            recurrent_layers.assign_runner(modules, self.documents)
        self._observe()

    def _isolate_mixers(self, module: nn.Module) -> list[nn.Module]:
        """Switch the innermost modules that mix tokens to per-document execution and return them."""
        candidate = self._is_candidate(module)
        if candidate and not self._mixes(module):
            return []
        within = [found for child in module.children() for found in self._isolate_mixers(child)]
        if not candidate or not self._mixes(module):
            return within
        recurrent_layers.assign_runner(within, None)
        if any(is_experts(inner) for inner in module.modules()):
            return []  # dispatch between ranks needs equally many calls on all ranks
        recurrent_layers.as_state_layer(module)
        recurrent_layers.assign_runner([module], self.documents)
        return [module]

    def _is_candidate(self, module: nn.Module) -> bool:
        """Return whether all tensor arguments are per token."""
        if module not in self.calls:
            return False
        tensors = list(document_bounds.tensors_in(self.calls[module]))
        if not tensors or tensors[0].dim() != 3 or not _is_of_tokens(tensors[0]):
            return False
        return all(
            _is_of_tokens(x) or (self.by_position and document_bounds.is_by_position(x, _TOKENS)) for x in tensors
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
    return x.dim() == 0 or document_bounds.is_per_token(x, 1, _TOKENS)


def _first(output: object) -> Tensor | None:
    return next(document_bounds.tensors_in(output), None)


def _first_changed(values: dict[Any, object]) -> dict[Any, object]:
    """Return the same arguments with another first token of the hidden states."""
    named = values.get("hidden_states")
    name = next(key for key, value in values.items() if value is named or (named is None and isinstance(value, Tensor)))
    changed = cast(Tensor, values[name]).clone()
    changed[:, 0] = 3 * changed[:, 0].flip(-1) + 1
    return {**values, name: changed}
