"""State of recurrent layers, one slot per sequence, in addition to the KV cache.

Modules store their state in a cache object of transformers. Which tensors are state is observed: tensors that appear
in the cache while a module runs (for example a recurrent state, or the last inputs of a convolution). They are stored
by slot. The cache of a decoding step contains views of the slots in use. Prompts of equal length run together, so that
the state belongs to the last token and no padding enters it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat
from automodel_cli.models.document_masking.document_bounds import DocumentBounds
from automodel_cli.rollout.engines.sampler.kv_cache import Decode, Prefill

NewCache = Callable[[], object]
"""An empty cache of the library, of the kind that the model's own generation makes."""

_Path = tuple["_Attribute | _Item", ...]


class StateSlots:
    """Runs state layers (`recurrent_layers.run_by`) and keeps their states."""

    def __init__(self, max_num_seqs: int, new_cache: NewCache):
        self.max_num_seqs, self._new_cache = max_num_seqs, new_cache
        self._states: dict[nn.Module, dict[_Path, Tensor]] = {}
        self._decoding: object = None  # the cache of decoding steps, created by the first prompts
        self._forward: Prefill | Decode | None = None
        self._documents: DocumentBounds | None = None
        self._batches: list[list[int]] = []
        self._caches: list[object] = []

    @property
    def bytes_of_slot(self) -> int:
        """Bytes of the state of one sequence, known after the first sequence."""
        return sum(x[0].nbytes for states in self._states.values() for x in states.values())

    @contextmanager
    def during(self, forward: Prefill | Decode) -> Iterator[None]:
        """State layers that run inside belong to this forward."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward, self._documents, self._caches = None, None, []

    def move(self, source: int, target: int) -> None:
        """Copy a slot over another one."""
        for states in self._states.values():
            for state in states.values():
                state[target] = state[source]

    def clear(self) -> None:
        """Forget every state, and free the memory."""
        self._states.clear()
        self._decoding = None

    def run(
        self, layer: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """See `recurrent_layers.Runner`."""
        assert self._forward is not None, "a state layer that generates belongs inside a forward of the sampler"
        name, keywords = _without_cache(layer, forward, args, kwargs)
        if isinstance(self._forward, Prefill):
            return self._prefill(layer, forward, name, keywords, self._forward)
        return self._decode(layer, forward, name, keywords, self._forward)

    def _prefill(
        self, layer: nn.Module, forward: Callable[..., object], name: str, keywords: dict[str, object], of: Prefill
    ) -> object:
        if self._documents is None:
            self._documents, self._batches = DocumentBounds.equally_long(of.lengths, of.cu_seqlens.device)
            self._caches = [self._new_cache() for _ in self._batches]
            if self._decoding is None:
                self._decoding = self._caches[0]
        # What appears in the cache during the call is the state of this layer. Names of the family are not needed.
        before = {id(tensor) for cache in self._caches for _, tensor in _tensors(cache)}
        output = self._documents.run(layer, forward, (), keywords, [{name: cache} for cache in self._caches])
        for cache, batch in zip(self._caches, self._batches, strict=True):
            states = {path: tensor for path, tensor in _tensors(cache) if id(tensor) not in before}
            self._store(layer, states, batch, of)
        return output

    def _store(self, layer: nn.Module, found: dict[_Path, Tensor], batch: list[int], of: Prefill) -> None:
        """Copy the states of a call from its cache into the slots of its prompts."""
        if not found or any(x.shape[0] != len(batch) for x in found.values()):
            raise _unsupported(layer, "writes no per-sequence state to the cache of transformers")
        states = self._states.setdefault(layer, {path: self._room(x) for path, x in found.items()})
        if {path: x.shape[1:] for path, x in found.items()} != {path: x.shape[1:] for path, x in states.items()}:
            raise _unsupported(layer, "has a state whose size depends on the sequence length")
        slots = [slot for prompt in batch for slot in of.slots[prompt]]
        rows = [row for row, prompt in enumerate(batch) for _ in of.slots[prompt]]
        for path, x in found.items():
            # Example: prompts 0 and 1 of equal length, prompt 0 with slots 0 and 1, prompt 1 with slot 2. slots = [0,
            # 1, 2], rows = [0, 0, 1]: the state of prompt 0 is copied twice.
            states[path][slots] = x[rows]

    def _room(self, state: Tensor) -> Tensor:
        return state.new_zeros(self.max_num_seqs, *state.shape[1:])

    def _decode(
        self, layer: nn.Module, forward: Callable[..., object], name: str, keywords: dict[str, object], of: Decode
    ) -> object:
        states = {path: state[: len(of.slot_B)] for path, state in self._states[layer].items()}
        for path, state in states.items():
            _put(self._decoding, path, state)
        output = forward(**keywords, **{name: self._decoding})
        for path, state in states.items():
            now = _at(self._decoding, path)
            if now is not state:  # most modules write in place, some store a new tensor
                state.copy_(now)
        return output


def _without_cache(
    layer: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[str, dict[str, object]]:
    """Return the name of the cache argument of the module, and its other arguments by name."""
    signature = inspect.signature(forward)
    name = next((name for name in transformers_compat.CACHE_ARGUMENTS if name in signature.parameters), None)
    if name is None:
        raise _unsupported(layer, "accepts no cache of transformers")
    bound = signature.bind(*args, **kwargs).arguments
    variable = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return name, {key: value for key, value in {**bound, **bound.pop(variable, {})}.items() if key != name}


def _unsupported(layer: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"the sampler does not support the recurrent state of {type(layer).__name__}: it {reason}",
        code="not_supported_by_model",
        keys=("rollout",),
        fix="rollout=hf",
    )


class _Attribute(NamedTuple):
    """An attribute on the path from a cache to a tensor."""

    name: str

    def of(self, holder: object) -> object:
        return getattr(holder, self.name)

    def assign(self, holder: object, value: Tensor) -> None:
        setattr(holder, self.name, value)


class _Item(NamedTuple):
    """A list index or dict key on that path."""

    key: Any

    def of(self, holder: Any) -> object:
        return holder[self.key]

    def assign(self, holder: Any, value: Tensor) -> None:
        holder[self.key] = value


def _tensors(value: object, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    """Every tensor in a cache, and the way to it."""
    steps: Iterable[tuple[_Attribute | _Item, object]] = ()
    match value:
        case Tensor():
            yield path, value
        case dict():
            steps = ((_Item(key), item) for key, item in value.items())
        case list():
            steps = ((_Item(index), item) for index, item in enumerate(value))
        case type() | nn.Module():
            pass
        case _:
            steps = ((_Attribute(name), item) for name, item in getattr(value, "__dict__", {}).items())
    for step, item in steps:
        yield from _tensors(item, (*path, step))


def _at(value: object, path: _Path) -> Any:
    for step in path:
        value = step.of(value)
    return value


def _put(value: object, path: _Path, tensor: Tensor) -> None:
    *way, last = path
    last.assign(_at(value, tuple(way)), tensor)
