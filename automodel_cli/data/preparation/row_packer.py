"""Pack the documents of one dataset and write the packed entry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.config import DataConfig, LongDocuments
from automodel_cli.data.packing import Pieces, cut_long, pack
from automodel_cli.data.preparation.statistics import KEEP_MOST, LongReport
from automodel_cli.data.row_errors import Rejected, rows_error
from automodel_cli.data.storage.indexed_store import IndexedTokens, write_indexed
from automodel_cli.data.storage.memmap_store import TokenStore
from automodel_cli.data.storage.memmap_writer import write_packed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RowPacker:
    """Packing of one dataset.

    Attributes:
        keeps_together: rows consist of several documents, so a long one is never split.
        choice: treatment of documents longer than `data.seq_len`.
    """

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    keeps_together: bool
    choice: LongDocuments

    def write(self, tokens: TokenStore | IndexedTokens, documents: np.ndarray | None, key: str, folder: Path) -> None:
        """Write the packed entry of `documents` (None: all) into an empty folder. Raises DataError."""
        config = self.config
        documents = np.arange(tokens.num_documents) if documents is None else documents
        lengths = tokens.lengths[documents]
        if config.packing == "wrapped":
            pieces, long = Pieces(documents, np.zeros_like(documents), lengths), LongReport("split")
        else:
            instead: LongDocuments = "drop" if self.keeps_together else "split"
            pieces = cut_long(lengths, config.seq_len, self.choice, instead)
            pieces = replace(pieces, document=documents[pieces.document])
            if isinstance(tokens, IndexedTokens):
                # A single token has no next token, so it has no label.
                kept = np.flatnonzero(pieces.length > 1)
            else:
                kept = self._with_labels(tokens, pieces, lengths)
            long = self._long_report(pieces, kept, lengths)
            pieces = pieces.take(kept)
        packed = pack(pieces, config.seq_len, config.packing)
        meta = {
            "key": key,
            "num_documents": len(documents),
            "num_tokens": int(lengths.sum()),
            "fill": packed.fill(config.seq_len),
            "long": vars(long),
            "num_turns": tokens.meta["num_turns"],
            "turn_ends": tokens.meta["turn_ends"],
        }
        if isinstance(tokens, IndexedTokens):
            write_indexed(folder, tokens, packed, meta=meta)
        else:
            write_packed(folder, tokens, packed, meta=meta)

    def _with_labels(self, tokens: TokenStore, pieces: Pieces, lengths: np.ndarray) -> np.ndarray:
        """Return the indices of the pieces with a trained token. Others cost compute and have no gradient.

        If an explicit `truncate` leaves a document without a trained token, it is rejected like a row without trained
        tokens. Documents removed by `auto` are counted.
        """
        config, empty = self.config, self._pieces_without_labels(tokens, pieces)
        if empty and config.truncation == "truncate" and config.on_invalid_row == "fail":
            reason = f"after truncation to seq_len={config.seq_len} no trained token is left"
            raise rows_error(
                [self._refused(tokens, int(pieces.document[i]), reason) for i in empty],
                len(lengths),
                fix="data.truncation=split (or drop), a larger data.seq_len, or data.on_invalid_row=drop",
            )
        return np.delete(np.arange(len(pieces.length)), empty)

    def _long_report(self, pieces: Pieces, kept: np.ndarray, lengths: np.ndarray) -> LongReport:
        """Return the report on long documents. `kept`: indices of the pieces with a label."""
        seq_len = self.config.seq_len
        is_long = lengths > seq_len
        return LongReport(
            self.choice,
            seq_len=seq_len,
            longest=int(lengths.max(initial=0)),
            length_of_most=int(np.quantile(lengths, KEEP_MOST, method="higher")) if len(lengths) else 0,
            num_documents=int(is_long.sum()),
            num_tokens=int(lengths[is_long].sum()),
            tokens_lost=int(lengths.sum() - (pieces.length - (pieces.start > 0))[kept].sum()),  # they overlap by one
            pieces_without_labels=len(pieces.length) - len(kept),
        )

    def _pieces_without_labels(self, tokens: TokenStore, pieces: Pieces) -> list[int]:
        """Return the indices of cut pieces without a label. None if every token of the dataset is trained."""
        # Every token but the first of each document is a label: no loss mask is in use, and no piece can lack one.
        if tokens.meta["num_label_tokens"] == len(tokens.ids) - tokens.num_documents:
            return []
        # Whole documents were checked when they were tokenized. Only parts of a document can have lost all trained
        # tokens.
        cut = np.flatnonzero(pieces.length < tokens.lengths[pieces.document])
        ends = (pieces.start + pieces.length).tolist()
        spans = [(i, int(pieces.document[i]), int(pieces.start[i]), ends[i]) for i in cut.tolist()]
        return [piece for piece, document, start, stop in spans if not tokens.is_trained(document, start, stop)]

    def _refused(self, tokens: TokenStore, document: int, reason: str) -> Rejected:
        text = self.tokenizer.decode(tokens.document(document)[0][:60].tolist())
        name = tokens.meta["files"][int(tokens.files[document])]
        return Rejected(name, int(tokens.lines[document]), "truncated_away", reason, text)
