"""Rows of new tokens in the embedding and the head of a checkpoint.

The tables of a checkpoint are read through `grown`: the old rows as stored, and behind them (or in unused rows) those
of the new tokens. Shards of ranks, pipeline stages and tied heads therefore read a checkpoint of the larger vocabulary.

A new row is the mean of the rows of the tokens into which the old tokenizer splits the text of the token, in fp32.
Example: `<plan>` was `<`, `plan`, `>`, so its row is the mean of these three. Without pieces, or with
`init_new_tokens=mean`, it is the mean of the rows of all old tokens. Rows without a token have this mean too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.models import transformers_compat
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.lazy_tensor import LazyTensor, StoredTensor
from automodel_cli.models.tokenizer import PretrainedTokenizer, tokenizer_node

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CHUNK = 4096  # rows that are read together


@dataclass(frozen=True)
class NewRows:
    """Growth of a vocabulary.

    num_stored: rows of the checkpoint.
    num_rows: rows of the model, at least `num_stored`.
    num_old_tokens: leading rows that belong to tokens of the old tokenizer.
    pieces: id of each new token -> ids whose rows are averaged. Empty: all old tokens.
    """

    num_stored: int
    num_rows: int
    num_old_tokens: int
    pieces: dict[int, tuple[int, ...]] = field(default_factory=dict)


def adds_tokens(config: ModelConfig) -> bool:
    """Return whether a checkpoint's tokenizer gets new tokens. Random weights have the vocabulary of their config."""
    node = tokenizer_node(config)
    return config.config is None and node is not None and bool(node.new_tokens)


def new_rows(config: ModelConfig, num_stored: int) -> NewRows | None:
    """Return the growth of a checkpoint with `num_stored` rows. None if the tokenizer has no new token.

    Raises ConfigError if the tokenizer cannot be loaded.
    """
    node = tokenizer_node(config)
    return _of_node(node, num_stored) if node is not None and adds_tokens(config) else None


@functools.cache
def _of_node(node: PretrainedTokenizer, num_stored: int) -> NewRows | None:
    old, new = node.without_new_tokens(), node.build()
    vocabulary = old.get_vocab()
    if known := [token for token in node.new_tokens if token in vocabulary]:
        message = "%d of the %d new tokens are in the tokenizer already and keep their rows: %s"
        warn("known_tokens", message, len(known), len(node.new_tokens), ", ".join(map(repr, known[:5])))
    added = [token for token in node.new_tokens if token not in vocabulary]
    if not added:
        return None
    num_old_tokens = min(num_stored, max(vocabulary.values()) + 1)
    ids = cast(list[int], new.convert_tokens_to_ids(added))  # a list for a list
    pieces = {}
    for token, row in zip(added, ids, strict=True):
        split = old(token, add_special_tokens=False)["input_ids"] if node.init_new_tokens == "pieces" else []
        known_pieces = (piece for piece in split if piece != old.unk_token_id and piece < num_stored)
        pieces[row] = tuple(known_pieces)
    multiple, largest = node.pad_to_multiple_of, max(pieces)
    num_rows = num_stored if largest < num_stored else -(-(largest + 1) // multiple) * multiple
    return NewRows(num_stored, num_rows, num_old_tokens, pieces)


def grow_config(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Set the vocabulary of a model with new tokens, in place. Raises ConfigError for a multimodal checkpoint."""
    node = tokenizer_node(config)
    if node is None or not node.new_tokens or config.config is not None:
        return
    if hf_config.get_text_config() is not hf_config:
        raise ConfigError(
            f"tokenizer.add_tokens is not supported because {config.pretrained} is a multimodal checkpoint, whose "
            "config the export keeps",
            code="not_supported_by_model",
            keys=("tokenizer.add_tokens",),
            fix="model.tokenizer=null",
        )
    rows = new_rows(config, hf_config.get_text_config().vocab_size)
    if rows is not None:
        hf_config.vocab_size = rows.num_rows


def grown(
    tensors: dict[str, StoredTensor], config: ModelConfig, hf_config: PretrainedConfig, unclaimed: Iterable[str]
) -> dict[str, StoredTensor]:
    """Return the lazy tensors of a checkpoint with the rows of new tokens. `hf_config` is the grown config.

    Raises ConfigError if a table of the model is not found by its name, or if tensors without a counterpart in the
    model have as many rows as its tables.
    """
    node = tokenizer_node(config)
    if node is None or not node.new_tokens or config.config is not None:
        return tensors
    names = table_names(hf_config, trust_remote_code=config.trust_remote_code)
    tables = {name for name in names if name in tensors}
    sizes = {tensors[name].get_shape()[0] for name in tables}
    foreign = [key for key in unclaimed if tensors[key].get_shape()[:1] in [[size] for size in sizes]]
    if not tables or len(sizes) != 1 or foreign:
        reason = f"its tensor {foreign[0]} may be a copy of a table" if foreign else "its tables have other names"
        raise ConfigError(
            f"tokenizer.add_tokens is not supported with {config.pretrained} because {reason}",
            code="not_supported_by_model",
            keys=("tokenizer.add_tokens",),
            fix="model.tokenizer=null",
        )
    rows = new_rows(config, sizes.pop())
    if rows is None:
        return tensors
    return {name: _Grown(lazy, rows) if name in tables else lazy for name, lazy in tensors.items()}


def table_names(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> set[str]:
    """Return the parameters whose first dimension is the vocabulary, measured by building two sizes on meta.

    Raises ConfigError if another dimension depends on the vocabulary.
    """
    shapes = []
    for extra in (0, 64):
        other = copy.deepcopy(hf_config)
        other.vocab_size += extra
        model = transformers_compat.meta_model(other, dtype=torch.float32, trust_remote_code=trust_remote_code)
        shapes.append({name: param.shape for name, param in model.named_parameters(remove_duplicate=False)})
    changed = {name for name, shape in shapes[0].items() if shape != shapes[1][name]}
    if odd := [name for name in changed if shapes[0][name][1:] != shapes[1][name][1:]]:
        raise ConfigError(
            f"tokenizer.add_tokens is not supported because the vocabulary is not the first dimension of {odd[0]}",
            code="not_supported_by_model",
            keys=("tokenizer.add_tokens",),
            fix="model.tokenizer=null",
        )
    return changed


class _Grown(LazyTensor):
    """A table `[V, ...]` of a checkpoint with the rows of new tokens."""

    def __init__(self, stored: StoredTensor, rows: NewRows):
        self._stored, self._rows = stored, rows
        self.dtype_name = stored.get_dtype()
        self.shape = [rows.num_rows, *stored.get_shape()[1:]]

    def _read(self, ranges: list[tuple[int, int]]) -> Tensor:
        (start, stop), *others = ranges
        others_index = tuple(slice(*of) for of in others)
        old_stop = min(max(start, stop), self._rows.num_stored)
        old = self._stored[(slice(min(start, old_stop), old_stop), *others_index)]
        result = torch.cat([old, old.new_empty(max(stop - max(start, old_stop), 0), *old.shape[1:])])
        for row in range(start, stop):
            if row in self._rows.pieces or row >= self._rows.num_stored:
                result[row - start] = self._first_value(row)[others_index].to(result.dtype)
        return result

    def _first_value(self, row: int) -> Tensor:
        pieces = self._rows.pieces.get(row, ())
        if not pieces:
            return self._mean
        return torch.stack([self._stored[piece : piece + 1][0].float() for piece in pieces]).mean(0)

    @functools.cached_property
    def _mean(self) -> Tensor:
        """Mean of the rows of all old tokens, in fp32."""
        count = self._rows.num_old_tokens
        chunks = (self._stored[start : min(start + _CHUNK, count)] for start in range(0, count, _CHUNK))
        return torch.stack([chunk.double().sum(0) for chunk in chunks]).sum(0).div(count).float()
