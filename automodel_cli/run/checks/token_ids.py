"""Check the token ids of the data against the size of the embedding."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.source import hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.data.storage.memmap_store import PackedStore
    from automodel_cli.data.streaming.streamed_data import StreamedData

_MULTIPLE = 64  # of embedding rows, which tensor parallelism and matrix units require


class _Rows(Protocol):
    def largest_id(self) -> tuple[int, str]: ...


class _Prepared(Protocol):
    @property
    def train(self) -> _Rows: ...
    @property
    def validation(self) -> _Rows | None: ...


def num_embeddings(config: ModelConfig) -> int:
    """Return the number of rows of the model's embedding."""
    rows: int = hf_config(config).get_text_config().vocab_size
    return rows


def check_prepared(prepared: _Prepared, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Raise ConfigError if a token of the training or validation data has no row in the embedding.

    A padding token beyond the table is replaced by a token in the table, because no token attends to padding.
    """
    _check_datasets({"training": prepared.train, "validation": prepared.validation}, tokenizer, config)


def _check_datasets(
    datasets: Mapping[str, _Rows | None], tokenizer: PreTrainedTokenizerBase, config: ModelConfig
) -> None:
    rows = _rows_if_too_few(tokenizer, config)
    if rows is None:
        return
    for name, dataset in datasets.items():
        if dataset is not None:
            _check(dataset, name, rows, tokenizer, config)
            if getattr(dataset, "pad_id", 0) >= rows:
                set_attributes(dataset, pad_id=pad_id(tokenizer, rows))


def check_streamed(streamed: StreamedData, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """The same for data that are read while the run trains: each block is checked before its first step."""
    _check_datasets({"validation": streamed.validation}, tokenizer, config)
    if (rows := _rows_if_too_few(tokenizer, config)) is None:
        return
    train = streamed.train
    train.check_store = lambda store: _check(_Stored(store), "training", rows, tokenizer, config)
    if train.pad_id >= rows:
        train.pad_id = pad_id(tokenizer, rows)


def check_tokens(
    documents: Sequence[tuple[str, Sequence[int]]], what: str, tokenizer: PreTrainedTokenizerBase, config: ModelConfig
) -> None:
    """Raise ConfigError if a token id of `documents` (place, ids) exceeds the embedding."""
    rows = _rows_if_too_few(tokenizer, config)
    if rows is not None and documents:
        _check(_Listed(documents), what, rows, tokenizer, config)


def pad_id(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> int:
    """Return the tokenizer's padding or end token, whichever comes first and has an embedding, otherwise 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((i for i in candidates if i is not None and i < num_rows), 0)


@dataclass(frozen=True)
class _Stored:
    store: PackedStore

    def largest_id(self) -> tuple[int, str]:
        return self.store.largest()


class _Listed:
    def __init__(self, documents: Sequence[tuple[str, Sequence[int]]]):
        self._documents = documents

    def largest_id(self) -> tuple[int, str]:
        return max((max(ids, default=-1), place) for place, ids in self._documents)


def _rows_if_too_few(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int | None:
    """Return the number of embedding rows if the tokenizer has larger ids, otherwise None."""
    rows = num_embeddings(config)
    return rows if max(tokenizer.get_vocab().values(), default=-1) >= rows else None


def _check(dataset: _Rows, what: str, rows: int, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    largest, place = dataset.largest_id()
    if largest < rows:
        return
    token = tokenizer.convert_ids_to_tokens(largest)
    raise ConfigError(
        f"token {token!r} of the {what} rows ({place}) has id {largest}, but the embedding holds ids 0 to {rows - 1} "
        f"({rows} rows)",
        code="vocabulary_mismatch",
        keys=("model.tokenizer", "model.config.vocab_size" if config.config is not None else "model.pretrained"),
        fix=_fix(max(tokenizer.get_vocab().values()) + 1, config),
    )


def _fix(needed: int, config: ModelConfig) -> str:
    """Return overrides if they suffice, otherwise a command that writes the model with a larger table."""
    longer = -(-needed // _MULTIPLE) * _MULTIPLE
    if config.config is not None:
        return f"model.config.vocab_size={longer}"
    own = "" if config.tokenizer is None else "model.tokenizer=null   (the tokenizer that came with the model), or "
    source = config.pretrained
    if source is None or config.gguf_file is not None:
        return own + "model.pretrained=<the model with a longer embedding>"
    target = f"{Path(source).name}-{longer}-rows"
    tokenizer = config.tokenizer if isinstance(config.tokenizer, str) else source
    model, tokens, folder = map(json.dumps, (source, tokenizer, target))
    code = (
        "from transformers import AutoModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"m = M.from_pretrained({model}); m.resize_token_embeddings({longer}); m.save_pretrained({folder}); "
        f"T.from_pretrained({tokens}).save_pretrained({folder})"
    )
    return f"{own}python -c {shlex.quote(code)}   (then model.pretrained={target})"
