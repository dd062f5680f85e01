"""A streamed dataset whose rows are documents of prepared shards (`data.start_after`).

Shards are read in groups of `start_after`, in the order in which they are prepared, so the order of a run depends on
their list and not on when each is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from automodel_cli.data.preparation.kept_shards import KeptShards
from automodel_cli.data.row_errors import RowError, SourceRow
from automodel_cli.data.source_config import TxtRows
from automodel_cli.data.sources.spans import Span
from automodel_cli.data.storage.memmap_store import TokenStore
from automodel_cli.data.streaming.stream_source import KnownFile, Shard
from automodel_cli.data.tokenized import Encoded, EncodedRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StoredDocuments:
    """Encoder of rows that are encoded already."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def encode(self, rows: Sequence[Any]) -> list[EncodedRow]:
        """Return the rows."""
        return list(rows)


class PreparedSource:
    """A dataset that is prepared while it is read. Waits for its first `start_after` shards.

    Args:
        shards: the shards of the dataset.
        start_after: shards of a group.
    """

    text_unit: TxtRows = "file"
    is_remote = False
    grows = False

    def __init__(self, shards: KeptShards, start_after: int):
        self._shards, self.name, self.note = shards, shards.name, ""
        listed = shards.listed()
        tag = hashlib.sha256(shards.folder.name.encode()).hexdigest()[:16]
        self.known = [KnownFile(f"{number}:{of.place}", of.size, tag) for number, of in enumerate(listed)]
        self.groups = [self.known[first : first + start_after] for first in range(0, len(listed), start_after)]
        for number in range(min(start_after, len(listed))):
            shards.wait(number)
        self.meta = shards.store(0).meta
        self.files: list[str] = list(self.meta["files"])
        self.num_bytes = sum(of.size for of in listed)

    def ingredients(self) -> dict[str, object]:
        """Empty: the state of the run contains the shards."""
        return {}

    def describe(self) -> str:
        """Return how many shards there are, and how many are prepared."""
        return f"{len(self.known):,} shards, {self._shards.num_ready(len(self.known)):,} prepared"

    def rows(self) -> Iterator[SourceRow]:
        """Yield the documents of the first shards, for a sample."""
        for file in self.groups[0]:
            for line, row in self.rows_of(file.name, Shard(Span(0))):
                yield SourceRow(0, line, row)

    def rows_of(self, name: str, shard: Shard) -> Iterator[Any]:
        """Yield every `parts`-th document of a shard, and of its rejected rows. Waits until it is prepared."""
        store = self._shards.store(int(name.partition(":")[0]))
        documents = store.num_documents
        rejected = store.rejected()
        for number in range(shard.part, documents + len(rejected), shard.parts):
            if number < documents:
                yield int(store.lines[number]), _document(store, number)
                continue
            row = rejected[number - documents]
            text = row.row if isinstance(row.row, str) else repr(row.row)
            yield row.line, RowError(row.code, f"{row.source}: {row.message}", fix=row.fix, raw=text)

    def close(self) -> None:
        """End the waits of all threads."""
        self._shards.close()


def _document(store: TokenStore, number: int) -> Encoded:
    ids, mask = store.document(number)
    trained = np.zeros(len(ids), np.uint8)
    trained[1:] = mask[:-1]  # the mask marks tokens whose next token is trained
    return Encoded(ids, trained)
