"""Rotary tables that depend on the length of the text: every document of a packed row gets the one it would get alone.

Two of the library's rotary types pick their frequencies by length: `longrope` (Phi-3, Phi-4-mini) by whether the text
is longer than the original context, `dynamic` (NTK) by its very length, once it is longer than the context. The library
takes for that length the largest position id of the whole microbatch, and `dynamic` keeps the longest it ever saw. So a
document's numbers depend on its neighbours, and under context parallelism on which of its tokens a rank holds.

`install` gives the rotary modules of a model a subclass that asks the library's own code for one table per length, and
picks for each token that of its own document. What a table holds stays the library's business. Documents are runs of
consecutive position ids, which is how `Batch`, prompts of the sampler and padding all write them; a token that is
decoded alone counts as the last of its document. Under context parallelism, where a rank holds pieces of documents, the
lengths are the `Context`'s.

Relied on in `transformers` (5.17 to 5.23): `rope_type` of a rotary module (a name, or one per layer type), the keys of
`config.rope_parameters`, and `max_seq_len_cached`, `inv_freq` and `original_inv_freq`, with which `dynamic` remembers.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.context_parallel_layout import Context

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTHS = "_document_lengths_BT"
_ORIGINAL = "original_max_position_embeddings"


def install_document_rope(model: nn.Module) -> None:
    """Make `model`'s rotary modules look at documents. A model without length-dependent ones is left as it is."""
    found = [module for module in model.modules() if _switches(module) and not isinstance(module, _PerDocument)]
    for module in found:
        cls = type(module)
        # The same name: the library initialises rotary modules by the name of their class.
        module.__class__ = type(cls.__name__, (_PerDocument, cls), {"__module__": cls.__module__})
    if found:
        base: nn.Module = getattr(model, "base_model", model)
        base.register_forward_pre_hook(_hand_over_lengths, with_kwargs=True)


def longest_unswitched(config: PretrainedConfig) -> int | None:
    """Up to how many tokens every text gets the same table; None where the tables do not depend on the length."""
    text = config.get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    limits = [_threshold(kind.get("rope_type"), kind, text) for kind in (per_layer_type or [rope])]
    return min((limit for limit in limits if limit is not None), default=None)


def document_lengths(position_ids_BT: Tensor) -> Tensor:
    """`[B, T]` int64: how long each token's document is, as far as its last position tells. No host synchronisation."""
    begins_BT = torch.ones_like(position_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = position_ids_BT[:, 1:] != position_ids_BT[:, :-1] + 1
    document_N = begins_BT.flatten().cumsum(0) - 1
    last_N = torch.zeros_like(document_N).scatter_reduce_(0, document_N, position_ids_BT.flatten(), "amax")
    return (last_N + 1)[document_N].view_as(position_ids_BT)


class _PerDocument(nn.Module):
    """Over a rotary class of the library: `forward(x, position_ids[, layer_type])` and its result stay the same."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
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
        if len(position_ids) == 1 and len(lengths_BT) > 1:  # positions that all rows have in common
            position_ids = position_ids.expand(len(lengths_BT), -1)
        if rope_type == "longrope":  # two tables: both are made, so that no length need be known on the host
            lengths_BT = lengths_BT.clamp(threshold, threshold + 1)
            lengths = [threshold, threshold + 1]
        else:
            lengths_BT = lengths_BT.clamp(min=threshold)
            lengths = lengths_BT.unique().tolist()
        # The longest table serves all longer texts. For the others, tokens of longer documents must not count.
        within = [position_ids.clamp(max=length - 1) for length in lengths[:-1]] + [position_ids]
        tables = [self._table(length, x, p, arguments) for length, p in zip(lengths, within, strict=True)]
        return _picked(tables, lengths_BT, lengths)

    def _table(self, length: int, x: Tensor, position_ids_BT: Tensor, arguments: tuple[str, ...]) -> Any:
        """What the library gives these positions in a text of at least `length` tokens that nothing came before."""
        self._forget(*arguments)
        last_B1 = position_ids_BT.new_full((len(position_ids_BT), 1), length - 1)
        result = super().forward(x, torch.cat([position_ids_BT, last_B1], 1), *arguments)
        return tuple(y[:, :-1] for y in result) if isinstance(result, tuple) else result[:, :-1]

    def _forget(self, layer_type: str | None = None) -> None:
        """`dynamic` grows its table with the longest text so far: back to how it was built. `longrope` keeps its long
        table for each layer type, and transformers 5.17 fails when it finds one (fixed in 5.23)."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        original = getattr(self, f"{prefix}original_inv_freq")
        current = getattr(self, f"{prefix}inv_freq")
        setattr(self, f"{prefix}inv_freq", original.to(current.device, copy=True))
        setattr(self, f"{prefix}max_seq_len_cached", self.original_max_seq_len)
        vars(self).pop(f"{prefix}long_inv_freq", None)


def _picked(tables: list[Any], lengths_BT: Tensor, lengths: list[int]) -> Any:
    """For each token the table of its document's length; a table is a tensor or several `[B, T, ...]`."""
    if isinstance(tables[0], tuple):
        return tuple(_picked(list(same), lengths_BT, lengths) for same in zip(*tables, strict=True))
    result = tables[0]
    for table, length in zip(tables[1:], lengths[1:], strict=True):
        result = torch.where((lengths_BT == length)[..., None], table, result)
    return result


def _hand_over_lengths(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward of a model: a rank that holds pieces of documents cannot tell their lengths by itself."""
    context: Context | None = kwargs.get("context")
    lengths_BT = None if context is None else context.local_document_lengths()
    for module in model.modules():
        if isinstance(module, _PerDocument):
            setattr(module, _LENGTHS, lengths_BT)


def _switches(module: nn.Module) -> bool:
    return any(_is_by_length(rope_type) for rope_type in _rope_types(module))


def _rope_types(module: nn.Module) -> Iterator[str]:
    rope_type: Any = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        yield rope_type
    elif isinstance(rope_type, dict):
        yield from (name for name in rope_type.values() if isinstance(name, str))


def _is_by_length(rope_type: str | None) -> bool:
    return rope_type is not None and (rope_type == "longrope" or "dynamic" in rope_type)


def _switch_of(module: Any, layer_type: str | None) -> tuple[str, int | None]:
    """The rotary type and the last length of its first table, None where there is one table for all."""
    parameters, rope_type = module.config.rope_parameters, module.rope_type
    if layer_type is not None:
        parameters, rope_type = parameters[layer_type], rope_type[layer_type]
    return rope_type, _threshold(rope_type, parameters, module.config)


def _threshold(rope_type: str | None, parameters: dict[str, Any], text: Any) -> int | None:
    if not _is_by_length(rope_type):
        return None
    limit: int = parameters[_ORIGINAL] if rope_type == "longrope" else text.max_position_embeddings
    return limit
