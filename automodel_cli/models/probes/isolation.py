"""Selects how a model isolates packed documents, by trying methods on a tiny copy, cheapest first.

1. Packed attention, and recurrent layers run document by document (`token_mixing.py`, `recurrent_layers.py`). 2. For
features without packed attention (sparse attention with a mask-reading indexer, compressed attention, position biases,
custom attention classes, dropout): the attention of transformers (`sdpa`, else `eager`), run document by document.
Exact by construction, at the cost of one T x T mask per microbatch if the family builds one.

A method is selected if a row of two documents gives the same hidden states as the unmodified model on each document
alone. If none does, packed attention is selected, and the packing probe (`packing_support.py`) reports the difference.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.document_masking import dynamic_rope, recurrent_layers
from automodel_cli.models.model_inputs import accepted_by, model_inputs_for
from automodel_cli.models.probes import token_mixing
from automodel_cli.models.probes.small_sizes import VOCAB

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Longer than every window, chunk and index size of a tiny copy. One is longer than all length switches (`SWITCH`).
_DOCUMENTS = (13, 9)
_TOLERANCE = 1e-4  # relative to the largest hidden value. Leaks are at least 1e-2.


@dataclass(frozen=True)
class IsolationMethod:
    """How a model isolates documents.

    attention: attention implementation of the model.
    classes: classes (`recurrent_layers.class_name`) of the modules that run document by document.
    by_document: attention is among them.
    """

    attention: str
    classes: frozenset[str] = frozenset()
    by_document: bool = False


def select_isolation(
    hf_config: PretrainedConfig, *, attention: str = PACKED, trust_remote_code: bool = False
) -> IsolationMethod:
    """Return the isolation method for this attention. The config is not changed.

    Attention other than packed is that of transformers, which applies its own masks. Takes about 0.2 s, cached per
    config and process.
    """
    if attention != PACKED:
        return IsolationMethod(
            attention,
            token_mixing.state_layer_classes(hf_config, attention=attention, trust_remote_code=trust_remote_code),
        )
    try:
        small = token_mixing.SmallConfig(hf_config, trust_remote_code)
    except Exception:  # families may reject unusual sizes
        return IsolationMethod(PACKED)
    return _first_exact(small)


@functools.lru_cache(maxsize=64)
def _first_exact(small: token_mixing.SmallConfig) -> IsolationMethod:
    for attention in (PACKED, "sdpa", "eager"):
        try:
            method = _try_method(small, attention)
        except Exception:  # model classes may fail in any way on unusual inputs
            continue
        if method is not None:
            return method
    return IsolationMethod(PACKED, token_mixing.state_layer_classes(small.config, trust_remote_code=small.trust))


def _try_method(small: token_mixing.SmallConfig, attention: str) -> IsolationMethod | None:
    """Return the method with this attention, None if it is not exact."""
    by_document = attention != PACKED
    if small.dropout and not by_document:
        _forward_with_dropout(small)
    model = small.build(attention)
    method = IsolationMethod(
        attention, token_mixing.classes_in(copy.deepcopy(model), by_position=by_document), by_document
    )
    alone = small.build("eager") if by_document else model
    return method if _is_exact(model, alone, method) else None


def _forward_with_dropout(small: token_mixing.SmallConfig) -> None:
    """Raise if the model passes dropout to packed attention."""
    noisy = small.build(PACKED, dropout=True).train()
    noisy.base_model(**accepted_by(noisy, model_inputs_for(_row(), _DOCUMENTS)), use_cache=False)


@torch.no_grad()
def _is_exact(model: PreTrainedModel, alone: PreTrainedModel, method: IsolationMethod) -> bool:
    """Return whether packed documents in `model` equal separate documents in `alone`. Both models are changed.

    The weights are equal. `alone` uses the attention of transformers.
    """
    together = copy.deepcopy(model).eval()
    dynamic_rope.install_document_rope(together)
    recurrent_layers.install_document_reset(together, method.classes, by_position=method.by_document)
    inputs = model_inputs_for(_row(), _DOCUMENTS)
    with recurrent_layers.documents_of(together, inputs):
        packed_hidden = together.base_model(**accepted_by(together, inputs), use_cache=False)[0]
    if not method.by_document:
        alone.set_attn_implementation("eager")
    alone.eval()
    # Use a new copy per document, because some rotary tables have state.
    separate = [copy.deepcopy(alone).base_model(input_ids=d, use_cache=False)[0] for d in _row().split(_DOCUMENTS, 1)]
    expected = torch.cat(separate, 1)
    return bool((packed_hidden - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _row() -> Tensor:
    ids_T = torch.randint(3, VOCAB, (sum(_DOCUMENTS),), generator=torch.Generator().manual_seed(0))
    return ids_T[None]
