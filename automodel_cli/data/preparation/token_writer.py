"""Encode rows of a dataset and write them as a token entry."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_cli.data.encoding.workers import Encodes, encode_all
from automodel_cli.data.formats.column_mapping import MissingColumnTracker
from automodel_cli.data.formats.unused_columns import IgnoredNames
from automodel_cli.data.pictures.storage import PictureWriter
from automodel_cli.data.row_errors import SourceRow, usable
from automodel_cli.data.storage.memmap_writer import write_tokens
from automodel_cli.data.tokenized import Encoded, EncodedRow, Unrolled, split_documents

Count = Callable[[int, int], None]
"""Called with the rows and tokens of each batch."""


@dataclass(frozen=True)
class TokenWriter:
    """Settings of a token entry. Picklable, for worker processes.

    Attributes:
        name: the dataset in messages.
        columns: `data.column_mapping`.
        meta: `meta.json` as far as it is known before the rows are read.
    """

    encoder: Encodes
    name: str
    columns: Mapping[str, str]
    ignored_columns: tuple[str, ...]
    meta: Mapping[str, Any]
    special_ids: frozenset[int]

    def write(
        self,
        folder: Path,
        rows: Iterable[SourceRow],
        *,
        num_workers: int = 0,
        count: Count = lambda rows, tokens: None,
        pictures: PictureWriter | None = None,
    ) -> MissingColumnTracker:
        """Write the entry of these rows into an empty folder. Return which mapped columns no row had."""
        unseen = MissingColumnTracker(self.columns, self.name)
        ignored = IgnoredNames(self.ignored_columns)
        for_rows, for_origins = itertools.tee(ignored.watch(unseen.watch(rows)))
        batches = encode_all(self.encoder, (origin.row for origin in for_rows), num_workers)
        # `not_ignored` and `names` change until the last row is written
        meta = {**self.meta, "not_ignored": ignored.missing, "names": ignored.present}
        write_tokens(
            folder,
            _counted(batches, count),
            for_origins,
            meta=meta,
            special_ids=self.special_ids,
            pictures=pictures,
        )
        return unseen


def _counted(batches: Iterable[list[EncodedRow]], count: Count) -> Iterator[list[EncodedRow]]:
    for batch in batches:
        items: list[Encoded | Unrolled] = usable(batch)
        documents = [document for item in items for document in split_documents(item)]
        count(len(batch), sum(len(document.ids) for document in documents))
        yield batch
