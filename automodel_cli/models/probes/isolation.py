"""How a model is run on rows of several documents, tried on a tiny copy of it, cheapest first.

1. Packed attention, and layers that carry a state document by document (`mixing.py`, `state_layers.py`).
2. What packed attention has not: sparse attention whose indexer reads a mask, compressed attention, biases by position,
   attention of a class's own, dropout. All attention is then the library's own (`sdpa`, else `eager`), run document by
   document: exact by construction, at the cost of one mask of tokens x tokens a microbatch where the family builds one.

A way is taken when a row of two documents gives what the library's own model gives each of them alone. Where none does,
packed attention is taken, and the packing probe (`support.py`) says what differs.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.document_masking import dynamic_rope, recurrent_layers
from automodel_cli.models.model_inputs import accepted_by, model_inputs_for
from automodel_cli.models.probes import token_mixing
from automodel_cli.models.probes.tiny_model import VOCAB

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# As those of the packing probe: longer than every shrunken window, chunk and index size, one longer than all switches
_DOCUMENTS = (13, 9)
_TOLERANCE = 1e-4  # of the largest hidden value; a leak is 1e-2 and more


@dataclass(frozen=True)
class IsolationMethod:
    """`attention`: what the library's model is built with. `classes` (`state_layers.class_name`): of the modules that
    are run document by document; `by_document`: its attention is among them."""

    attention: str
    classes: frozenset[str] = frozenset()
    by_document: bool = False


def select_isolation(
    hf_config: PretrainedConfig, *, attention: str = PACKED, trust_remote_code: bool = False
) -> IsolationMethod:
    """The way for this attention. Any but packed is the library's, and is shown documents by the library's masks as far
    as it looks at them. The config is not changed; about 0.2 s, once per config and process."""
    if attention != PACKED:
        return IsolationMethod(
            attention,
            token_mixing.state_layer_classes(hf_config, attention=attention, trust_remote_code=trust_remote_code),
        )
    try:
        small = token_mixing.SmallConfig(hf_config, trust_remote_code)
    except Exception:  # any family may refuse sizes it never saw
        return IsolationMethod(PACKED)
    return _way(small)


@functools.lru_cache(maxsize=64)
def _way(small: token_mixing.SmallConfig) -> IsolationMethod:
    for attention in (PACKED, "sdpa", "eager"):
        try:
            way = _tried(small, attention)
        except Exception:  # any class of the library may fail in its own way on what it never saw
            continue
        if way is not None:
            return way
    return IsolationMethod(PACKED, token_mixing.state_layer_classes(small.config, trust_remote_code=small.trust))


def _tried(small: token_mixing.SmallConfig, attention: str) -> IsolationMethod | None:
    """The way with this attention, if it is exact."""
    by_document = attention != PACKED
    if small.dropout and not by_document:
        _forward_with_dropout(small)
    model = small.build(attention)
    way = IsolationMethod(
        attention, token_mixing.classes_in(copy.deepcopy(model), by_position=by_document), by_document
    )
    alone = small.build("eager") if by_document else model
    return way if _is_exact(model, alone, way) else None


def _forward_with_dropout(small: token_mixing.SmallConfig) -> None:
    """Raises where packed attention would be asked for dropout."""
    noisy: Any = small.build(PACKED, dropout=True).train()
    noisy.base_model(**accepted_by(noisy, model_inputs_for(_row(), _DOCUMENTS)), use_cache=False)


@torch.no_grad()
def _is_exact(model: Any, alone: Any, way: IsolationMethod) -> bool:
    """Whether a row of documents gives in `model` what the library's own attention in `alone` gives each of them, with
    the same weights. Both are changed."""
    together = copy.deepcopy(model).eval()
    dynamic_rope.install_document_rope(together)
    recurrent_layers.install_document_reset(together, way.classes, by_position=way.by_document)
    inputs = model_inputs_for(_row(), _DOCUMENTS)
    with recurrent_layers.documents_of(together, inputs):
        got = together.base_model(**accepted_by(together, inputs), use_cache=False)[0]
    if not way.by_document:
        alone.set_attn_implementation("eager")
    alone.eval()
    # each on a copy of its own: some rotary tables remember what they saw
    each = [copy.deepcopy(alone).base_model(input_ids=d, use_cache=False)[0] for d in _row().split(_DOCUMENTS, 1)]
    want = torch.cat(each, 1)
    return bool((got - want).abs().max() <= _TOLERANCE * want.abs().max())


def _row() -> Tensor:
    ids_T = torch.randint(3, VOCAB, (sum(_DOCUMENTS),), generator=torch.Generator().manual_seed(0))
    return ids_T[None]
