"""Length-dependent rotary tables: every document of a packed row gets the table that it would get alone.

Two rotary types of transformers select frequencies by length. `longrope` (Phi-3, Phi-4-mini) has one table for texts up
to the original context and one for longer texts. `dynamic` (NTK) depends on the length itself once it exceeds the
context. transformers uses the largest position id of the microbatch as the length, and `dynamic` keeps the largest it
has seen. Without this module, the values of a document depend on its neighbors, and with context parallelism on the
local tokens.

Example: with an original context of 4096, a row with documents of 6000 and 100 tokens gives both documents the long
table. Alone, the short document gets the short table.

`install_document_rope` replaces the class of rotary modules by a subclass. It calls the code of transformers once per
length and selects the table of each token's document. Documents are runs of consecutive position ids, as in `Batch`,
prompts of the sampler and padding. A token that is decoded alone counts as the last of its document. With context
parallelism, ranks hold parts of documents, and the `Context` provides the lengths.

Depends on these names in `transformers` (5.17 to 5.24): `rope_type` of a rotary module (a name, or one per layer type),
the keys of `config.rope_parameters`, and `max_seq_len_cached`, `inv_freq` and `original_inv_freq`, the state of
`dynamic`.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models.context_parallel_layout import Context

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTHS = "_document_lengths_BT"
_ORIGINAL = "original_max_position_embeddings"


def install_document_rope(model: nn.Module) -> None:
    """Make the length-dependent rotary modules of `model` document-aware. Other models are not changed."""
    rotary_modules = [
        module for module in model.modules() if _switches(module) and not isinstance(module, _PerDocument)
    ]
    for module in rotary_modules:
        cls = type(module)
        # Keep the name, because transformers initializes rotary modules by class name.
        module.__class__ = type(cls.__name__, (_PerDocument, cls), {"__module__": cls.__module__})
    if rotary_modules:
        base: nn.Module = getattr(model, "base_model", model)
        base.register_forward_pre_hook(_set_lengths, with_kwargs=True)


def longest_unswitched(config: PretrainedConfig) -> int | None:
    """Return the largest text length [tokens] with the first table, None if tables do not depend on the length."""
    text = config.get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    limits = [_threshold(kind.get("rope_type"), kind, text) for kind in (per_layer_type or [rope])]
    return min((limit for limit in limits if limit is not None), default=None)


def document_lengths(position_ids_BT: Tensor) -> Tensor:
    """Return the length of each token's document, `[B, T]` int64, from its last position. No host synchronization."""
    # Example: positions 0 1 2 0 1. A document begins where a position does not follow the one before it. The lengths
    # are 3 3 3 2 2: the largest position of a document plus one.
    begins_BT = torch.ones_like(position_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = position_ids_BT[:, 1:] != position_ids_BT[:, :-1] + 1
    document_N = begins_BT.flatten().cumsum(0) - 1
    last_N = torch.zeros_like(document_N).scatter_reduce_(0, document_N, position_ids_BT.flatten(), "amax")
    return (last_N + 1)[document_N].view_as(position_ids_BT)


class _PerDocument(nn.Module):
    """Subclass of a rotary class of transformers. Signature and result of `forward(x, position_ids[, layer_type])` are
    unchanged."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> object:
        rope_type, threshold = _switch_of(self, layer_type)
        arguments = () if layer_type is None else (layer_type,)
        if threshold is None:
            return super().forward(x, position_ids, *arguments)
        if position_ids.dim() != 2:
            raise ConfigError(
                f"{type(self).__name__} with {rope_type} rotary tables is not supported because its position ids have "
                f"{position_ids.dim()} dimensions instead of 2",
                code="not_supported_by_model",
                keys=("model",),
            )
        lengths_BT: Tensor | None = getattr(self, _LENGTHS, None)
        if lengths_BT is None:
            lengths_BT = document_lengths(position_ids)
        lengths_BT = lengths_BT.expand(len(position_ids), -1) if len(lengths_BT) == 1 else lengths_BT
        if len(position_ids) == 1 and len(lengths_BT) > 1:  # positions shared by all rows
            position_ids = position_ids.expand(len(lengths_BT), -1)
        if rope_type == "longrope":  # two tables: compute both, which needs no host synchronization
            lengths_BT = lengths_BT.clamp(threshold, threshold + 1)
            lengths = [threshold, threshold + 1]
        else:
            lengths_BT = lengths_BT.clamp(min=threshold)
            lengths = lengths_BT.unique().tolist()
        # Clamp positions of longer documents, so that each table is computed for its own length.
        within = [position_ids.clamp(max=length - 1) for length in lengths[:-1]] + [position_ids]
        tables = [self._table(length, x, p, arguments) for length, p in zip(lengths, within, strict=True)]
        return _select(tables, lengths_BT, lengths)

    def _table(self, length: int, x: Tensor, position_ids_BT: Tensor, arguments: tuple[str, ...]) -> object:
        """Return the tables of these positions in a text of at least `length` tokens, independent of earlier texts."""
        self._reset(*arguments)
        # The module selects its table by the largest position. One more token at `length` - 1 selects the table of this
        # length, and is removed from the result.
        last_B1 = position_ids_BT.new_full((len(position_ids_BT), 1), length - 1)
        result = super().forward(x, torch.cat([position_ids_BT, last_B1], 1), *arguments)
        return tuple(y[:, :-1] for y in result) if isinstance(result, tuple) else result[:, :-1]

    def _reset(self, layer_type: str | None = None) -> None:
        """Restore the initial state.

        `dynamic` grows its table with the longest text so far. `longrope` stores its long table per layer type, and
        transformers 5.17 fails if one exists (fixed in 5.23).
        """
        prefix = "" if layer_type is None else f"{layer_type}_"
        original = getattr(self, f"{prefix}original_inv_freq")
        current = getattr(self, f"{prefix}inv_freq")
        setattr(self, f"{prefix}inv_freq", original.to(current.device, copy=True))
        setattr(self, f"{prefix}max_seq_len_cached", self.original_max_seq_len)
        vars(self).pop(f"{prefix}long_inv_freq", None)


def _select(tables: list[object], lengths_BT: Tensor, lengths: list[int]) -> object:
    """Select for each token the table of its document's length. A table is one or several tensors `[B, T, ...]`."""
    if isinstance(tables[0], tuple):
        return tuple(_select(list(same), lengths_BT, lengths) for same in zip(*tables, strict=True))
    result, *others = cast(list[Tensor], tables)
    for table, length in zip(others, lengths[1:], strict=True):
        result = torch.where((lengths_BT == length)[..., None], table, result)
    return result


def _set_lengths(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Forward pre-hook: pass the document lengths of the context to rotary modules, because ranks hold parts of
    documents."""
    context = cast(Context | None, kwargs.get("context"))
    lengths_BT = None if context is None else context.local_document_lengths()
    for _, module in modules_of(model, _PerDocument):
        setattr(module, _LENGTHS, lengths_BT)


def _switches(module: nn.Module) -> bool:
    return any(_is_by_length(rope_type) for rope_type in _rope_types(module))


def _rope_types(module: nn.Module) -> Iterator[str]:
    match getattr(module, "rope_type", None):
        case str(rope_type):
            yield rope_type
        case dict(by_layer_type):
            yield from (name for name in by_layer_type.values() if name is not None)


def _is_by_length(rope_type: str | None) -> bool:
    return rope_type is not None and (rope_type == "longrope" or "dynamic" in rope_type)


def _switch_of(module: Any, layer_type: str | None) -> tuple[str, int | None]:
    """Return the rotary type and the largest length of its first table, None if there is one table for all lengths."""
    parameters, rope_type = module.config.rope_parameters, module.rope_type
    if layer_type is not None:
        parameters, rope_type = parameters[layer_type], rope_type[layer_type]
    return rope_type, _threshold(rope_type, parameters, module.config)


def _threshold(rope_type: str | None, parameters: dict[str, Any], text: PretrainedConfig) -> int | None:
    if not _is_by_length(rope_type):
        return None
    limit: int = parameters[_ORIGINAL] if rope_type == "longrope" else text.max_position_embeddings
    return limit
