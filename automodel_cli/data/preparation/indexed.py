"""Token files as a dataset: an entry with the places of their documents. The tokens are not copied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.sources.sources import TokenSource
from automodel_cli.data.storage.cache import entry_key, get_or_build
from automodel_cli.data.storage.indexed_store import IndexedTokens, write_index
from automodel_cli.data.token_files import nanogpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def index_tokens(
    source: TokenSource, tokenizer: PreTrainedTokenizerBase, tokenizer_key: str, config: DataConfig, root: Path
) -> tuple[IndexedTokens, str, bool]:
    """Return the documents of token files, the key of their entry, and whether this call built it.

    Raises DataError for files without documents, and for ids that the tokenizer does not have.
    """
    key = entry_key({"kind": "indexed", "tokenizer": tokenizer_key, **source.ingredients()})
    folder, built = get_or_build(
        root,
        key,
        lambda folder: write_index(
            folder,
            source.paths,
            delimiters=nanogpt.delimiters_of(tokenizer),
            special_ids={*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder},
            meta={"files": source.files},
        ),
    )
    tokens = IndexedTokens.open(folder)
    tokens.meta["not_ignored"] = list(config.ignored_columns)  # there are no columns
    if not tokens.num_documents:
        raise DataError(f"{source.name} has no tokens", code="not_enough_rows", keys=("data.path",))
    largest, place = tokens.meta["largest"]
    number = max(tokenizer.get_vocab().values(), default=-1) + 1
    if largest >= number:
        raise DataError(
            f"{source.name} has the token {largest} ({place}), but the tokenizer has {number:,} tokens: the file was "
            "written with another tokenizer",
            code="vocabulary_mismatch",
            keys=("data.path", "model.tokenizer"),
            fix="model.tokenizer=<the tokenizer of the file>",
        )
    return tokens, key, built
