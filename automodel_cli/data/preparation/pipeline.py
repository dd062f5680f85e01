"""Convert the `data:` section to packed sequences on disk.

`prepare` needs no process group. All ranks may call it at once: a file lock lets one rank build missing entries.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.chat_template import choose_template
from automodel_cli.data.chat.encoder import GENERATION_TAG
from automodel_cli.data.config import DataConfig, LongDocuments
from automodel_cli.data.formats.base import PREFERENCES, DataKind
from automodel_cli.data.formats.builtin import FORMATS, detect_format, find_format, format_name
from automodel_cli.data.formats.column_mapping import MissingColumnTracker, check_mapped
from automodel_cli.data.formats.unused_columns import IgnoredNames, unused_columns
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.packing import Pieces, cut_long, pack
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import COLUMNS as PICTURE_COLUMNS
from automodel_cli.data.pictures.storage import PictureTable, PictureWriter
from automodel_cli.data.preparation.dataset import PackedDataset, Store
from automodel_cli.data.preparation.indexed import index_tokens
from automodel_cli.data.preparation.parts import Part, check_names, check_rows, hold_out
from automodel_cli.data.preparation.pre_rendered import SAMPLE_ROWS
from automodel_cli.data.preparation.statistics import (
    KEEP_MOST,
    DataReport,
    LongReport,
    SourceReport,
    SpecialReport,
    UnrolledReport,
)
from automodel_cli.data.preparation.tokenize import EncodeSpec, RowEncoder, choose_workers, encode_all
from automodel_cli.data.row_errors import Rejected, RowError, rows_error
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, TaskSource, TokenSource, first_rows, open_source
from automodel_cli.data.storage.cache import cache_root, entry_key, get_or_build, tokenizer_fingerprint
from automodel_cli.data.storage.code_fingerprint import fingerprint
from automodel_cli.data.storage.indexed_store import IndexedStore, IndexedTokens, write_indexed
from automodel_cli.data.storage.memmap_store import PackedStore, TokenStore, write_packed, write_tokens
from automodel_cli.data.tokenized import Encoded, Unrolled, split_documents

PROGRESS_SECONDS = 5.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class PreparedData:
    """Data of a run: training and validation sequences, and the report of the preparation."""

    train: PackedDataset
    validation: PackedDataset | None
    report: DataReport


def prepare_data(
    config: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    preferences: bool = False,
    stop_ids: Sequence[int] = (),
    progress: Progress | None = None,
    pictures: PictureSupport | None = None,
    row_spec: LabelSpec | GroupSpec | None = None,
) -> PreparedData:
    """Tokenize, mask, pack and cache the data, or load it from the cache.

    Args:
        preferences: rows are pairs or rated responses (`data/formats/preference.py`).
        seed: selects the rows for `validation_size`.
        stop_ids: tokens that stop generation, in addition to EOS.
        progress: called with a line every few seconds of a long tokenization. Default: standard error.
        pictures: reads the pictures of rows.
        row_spec: rows are texts with labels, or queries with passages, read in this way.

    Raises:
        DataError: lists every unusable row, grouped by cause.
    """
    began = time.perf_counter()
    kind: DataKind = row_spec.kind if row_spec is not None else "preferences" if preferences else "documents"
    config.check_kind(kind)
    show = progress or (lambda line: print(line, file=sys.stderr))
    builder = _Builder(config, tokenizer, kind, tuple(stop_ids), show, pictures, row_spec)
    train, validation = builder.tokenised()
    check_names(config, [*train, *validation])
    check_rows(config, [*train, *validation])
    if config.validation_size:
        train, validation = hold_out(train, config.validation_size, seed)
    packed_train = [builder.packed(part) for part in train]
    packed_validation = [builder.packed(part) for part in validation]
    report = DataReport(
        [r for _, r in packed_train],
        [r for _, r in packed_validation],
        cache=str(builder.root),
        seconds=time.perf_counter() - began,
    )
    return PreparedData(
        builder.dataset(train, [store for store, _ in packed_train]),
        builder.dataset(validation, [store for store, _ in packed_validation]) if validation else None,
        report,
    )


_ANY_FORMAT: dict[DataKind, str] = {
    "documents": "text",
    "preferences": "unpaired_preference",
    "labeled": "labeled",
    "groups": "retrieval",
}


class _Builder:
    """State of one `prepare` call: tokenizer, template and cache folder."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        kind: DataKind,
        stop_ids: tuple[int, ...],
        progress: Progress,
        pictures: PictureSupport | None,
        row_spec: LabelSpec | GroupSpec | None,
    ):
        self.config, self.tokenizer, self.kind, self.progress = config, tokenizer, kind, progress
        self.pictures, self.row_spec = pictures, row_spec
        self.stop_ids = stop_ids
        self.root = cache_root(config.cache_dir)
        self.template = choose_template(config.chat_template, tokenizer, config.multi_turn)
        self.preferences = kind == "preferences"
        self.keeps_together = kind in ("preferences", "groups")
        self.tokenizer_key = tokenizer_fingerprint(tokenizer)

    def tokenised(self) -> tuple[list[Part], list[Part]]:
        """Training and validation sources with their tokens."""
        config = self.config
        if config.generator is not None:
            fmt = getattr(config.generator, "format", "messages")
            described = SourceConfig("task", format=fmt if self.kind == "documents" else "auto")
            train = TaskSource(config.generator, "train"), described
            validation = TaskSource(config.generator, "validation"), described
            return [self._tokens(*train)], [self._tokens(*validation)]
        sources = config.train_sources()
        held_out = config.validation_source()
        extra = [] if held_out is None else [held_out]
        parts = [self._tokens(open_source(s, self.root), s) for s in sources]
        return [replace(part, number=number) for number, part in enumerate(parts)], [
            self._tokens(open_source(s, self.root, whole=config.validation_path is not None), s) for s in extra
        ]

    def _tokens(self, source: Source, config: SourceConfig) -> Part:
        if isinstance(source, TokenSource):
            if self.preferences or self.labels is not None or self.pictures is not None:
                source.rows()  # raises
            return Part(source, *index_tokens(source, self.tokenizer, self.tokenizer_key, self.config, self.root))
        ingredients = {
            **source.ingredients(),
            "format": config.format if isinstance(config.format, str) else fingerprint(config.format),
            "columns": config.column_mapping,
            "template": self.template.text,
            "own_template": self.template.own,
            "turns": self.config.multi_turn,
            "stop_ids": sorted(self.stop_ids),
            "tokenizer": self.tokenizer_key,
            "mask": self.config.loss_mask,
            "special_tokens_policy": self.config.special_tokens_policy,
            "ignored_columns": self.config.ignored_columns,
            "add_bos": self.config.add_bos,
            "add_eos": self.config.add_eos,
            "preferences": self.preferences,
            "row_spec": None if self.row_spec is None else [self.kind, vars(self.row_spec)],
        }
        if self.pictures is not None:
            rows = self.pictures.rows
            ingredients["pictures"] = [self.pictures.processor.cache_key(), rows.folder, rows.max_pixels, "with grids"]
        key = entry_key({"kind": "tokens", **ingredients})
        folder, built = get_or_build(self.root, key, lambda folder: self._write_tokens(folder, source, config))
        if self.pictures is not None and (files := PictureTable.open(folder).changed()):
            key = entry_key({"kind": "tokens", **ingredients, "picture_files": files})
            folder, built = get_or_build(self.root, key, lambda folder: self._write_tokens(folder, source, config))
        return Part(source, TokenStore.open(folder), key, built)

    def _write_tokens(self, folder: Path, source: Source, config: SourceConfig) -> None:
        examples = first_rows(source)
        check_mapped(examples, config.column_mapping, source.name)
        if config.format != "auto":
            fmt = find_format(config.format)
        elif examples:
            fmt = detect_format(examples, config.column_mapping, source.name, kind=self.kind)
        else:  # no readable row: any format works, since every row is rejected by its own error
            fmt = FORMATS[_ANY_FORMAT[self.kind]]
        template, data = self.template, self.config
        spec = EncodeSpec(
            fmt,
            config.column_mapping,
            template.text,
            data.loss_mask,
            ignored_columns=tuple(data.ignored_columns),
            special_tokens_policy=data.special_tokens_policy,
            turns=data.multi_turn,
            own_template=template.own,
            stop_ids=self.stop_ids,
            add_bos=data.add_bos,
            add_eos=data.add_eos,
            row_spec=self.row_spec,
        )
        encoder = RowEncoder(self.tokenizer, spec, self.pictures)
        encoder.refuse_rendered(first_rows(source, SAMPLE_ROWS), data, source.name)
        unseen = MissingColumnTracker(config.column_mapping, source.name)
        ignored = IgnoredNames(data.ignored_columns)
        for_rows, for_origins = itertools.tee(ignored.watch(unseen.watch(source.rows())))
        workers = choose_workers(self.config.num_workers, source.num_bytes) if self.pictures is None else 0
        batches = encode_all(encoder, (origin.row for origin in for_rows), workers)
        write_tokens(
            folder,
            self._counted(batches, source.name),
            for_origins,
            meta={
                "files": source.files,
                "dtype": "uint16" if len(self.tokenizer) <= 2**16 else "int32",
                "kind": fmt.makes if fmt.makes in (*PREFERENCES, "labeled", "groups") else "documents",
                "row_spec": None if self.row_spec is None else vars(self.row_spec),
                "is_text": fmt.makes == "texts",
                "format": format_name(fmt) + (", detected" if config.format == "auto" else ""),
                "masked_by": self._masked_by(fmt.makes),
                "special_choice": spec.special_choice,
                "unused": unused_columns(examples, self._columns_read(encoder)),
                "not_ignored": ignored.missing,  # both lists change until the last row is written
                "names": ignored.present,
                "has_pictures": self.pictures is not None,
            },
            special_ids={*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder},
            pictures=None if self.pictures is None else PictureWriter(folder),
        )
        unseen.check()

    def _columns_read(self, encoder: RowEncoder) -> set[str]:
        return encoder.reader.columns_read | set(PICTURE_COLUMNS if self.pictures is not None else ())

    def _counted(
        self, batches: Iterable[list[Encoded | Unrolled | RowError]], name: str
    ) -> Iterator[list[Encoded | Unrolled | RowError]]:
        shown = time.perf_counter()
        rows = tokens = 0
        for batch in batches:
            rows += len(batch)
            tokens += sum(len(d.ids) for item in batch if not isinstance(item, RowError) for d in split_documents(item))
            if time.perf_counter() - shown > PROGRESS_SECONDS:
                shown = time.perf_counter()
                self.progress(f"tokenising {name}: {rows:,} rows, {tokens:,} tokens")
            yield batch

    def _masked_by(self, makes: str) -> str:
        if makes in ("labeled", "groups"):
            return "nothing: texts are compared as a whole"
        if makes == "texts":
            return "nothing: every token is trained"
        if self.template.text is None:
            return "the end of the prompt" if self.config.loss_mask != "all" else "nothing: every token is trained"
        turns = {"assistant": "assistant turns", "last_turn": "last assistant turn", "all": "all tokens"}[
            self.config.loss_mask
        ]
        by_tags = GENERATION_TAG.search(self.template.text) and self.config.loss_mask != "all"
        way = "the template's generation tags" if by_tags else "prefix difference, verified per row"
        if self.template.name is not None:
            way = f"our training template for {self.template.name}, because the tokenizer's rewrites earlier turns"
        elif self.config.multi_turn == "per_turn":
            way = "what follows each turn's prompt"
        return turns if self.config.loss_mask == "all" else f"{way} ({turns})"

    def packed(self, part: Part) -> tuple[Store, SourceReport]:
        """The packed rows of one part, built or found, and its line in the report."""
        config = self.config
        choice = config.long_choice(is_text=part.tokens.meta["is_text"], preferences=self.keeps_together)
        key = entry_key(
            {
                "kind": "packed",
                "tokens": part.key,
                "seq_len": config.seq_len,
                "packing": config.packing,
                "truncation": [config.truncation, choice],
                "held_out": part.held_out,
            }
        )
        folder, built = get_or_build(self.root, key, lambda folder: self._write_packed(folder, part, key, choice))
        store: Store
        if isinstance(part.source, TokenSource):
            store = IndexedStore.open(folder, part.source.paths)
        else:
            store = PackedStore.open(folder)
        meta, counts = part.tokens.meta, store.meta
        if config.cross_documents and not meta["is_text"]:
            raise DataError(
                f"cross_documents=true is not supported for {part.source.name}, which has conversations or prompts",
                code="wrong_data_kind",
                keys=("data.cross_documents",),
                fix="data.cross_documents=false",
            )
        joins = len(store.offsets) - 1 - store.num_rows if config.cross_documents else 0
        report = SourceReport(
            name=part.source.name,
            fmt=meta["format"],
            num_rows=meta["num_rows"],
            num_rejected=meta["num_rejected"],
            rejected_path=str(part.tokens.folder / "rejected.jsonl"),
            num_documents=counts["num_documents"],
            num_tokens=counts["num_tokens"],
            num_label_tokens=int(store.num_label_tokens.sum()) + joins,
            masked_by=meta["masked_by"],
            special=SpecialReport(meta["special_choice"], meta["special_tokens"], meta["special_rows"]),
            unused=meta["unused"] if self.config.generator is None else [],
            ends_trained=1.0 if joins or self.row_spec else meta["ends_trained"] / max(1, part.tokens.num_documents),
            packing=config.packing,
            seq_len=config.seq_len,
            num_packed_rows=store.num_rows,
            fill=counts["fill"],
            long=LongReport(**counts["long"]),
            use=config.mixture().describe(part.number) if part.number >= 0 else "",
            built=part.built or built,
            unrolled=UnrolledReport(**meta["unrolled"]),
            note=part.source.note,
        )
        return store, report

    def _write_packed(self, folder: Path, part: Part, key: str, choice: LongDocuments) -> None:
        config, tokens = self.config, part.tokens
        documents = np.arange(tokens.num_documents) if part.documents is None else part.documents
        lengths = tokens.lengths[documents]
        if config.packing == "wrapped":
            pieces, long = Pieces(documents, np.zeros_like(documents), lengths), LongReport("split")
        else:
            instead: LongDocuments = "drop" if self.keeps_together else "split"
            pieces = cut_long(lengths, config.seq_len, choice, instead)
            pieces = replace(pieces, document=documents[pieces.document])
            if isinstance(tokens, IndexedTokens):
                kept = np.flatnonzero(pieces.length > 1)
                long = _long_report(config.seq_len, choice, pieces, kept, lengths)
                pieces = pieces.take(kept)
            else:
                pieces, long = self._without_labels(tokens, pieces, lengths, choice)
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

    def _without_labels(
        self, tokens: TokenStore, pieces: Pieces, lengths: np.ndarray, choice: LongDocuments
    ) -> tuple[Pieces, LongReport]:
        """Remove pieces of split documents without a trained token: they cost compute and have no gradient.

        If an explicit `truncate` leaves a document without a trained token, it is rejected like a row without trained
        tokens. Documents removed by `auto` are counted.
        """
        config = self.config
        cut = np.flatnonzero(pieces.length < tokens.lengths[pieces.document])
        ends = (pieces.start + pieces.length).tolist()
        spans = [(i, int(pieces.document[i]), int(pieces.start[i]), ends[i]) for i in cut.tolist()]
        empty = [piece for piece, document, start, stop in spans if not tokens.is_trained(document, start, stop)]
        if empty and config.truncation == "truncate" and config.on_invalid_row == "fail":
            reason = f"after truncation to seq_len={config.seq_len} no trained token is left"
            raise rows_error(
                [self._refused(tokens, int(pieces.document[i]), reason) for i in empty],
                len(lengths),
                fix="data.truncation=split (or drop), a larger data.seq_len, or data.on_invalid_row=drop",
            )
        kept = np.delete(np.arange(len(pieces.length)), empty)
        return pieces.take(kept), _long_report(config.seq_len, choice, pieces, kept, lengths)

    def _refused(self, tokens: TokenStore, document: int, reason: str) -> Rejected:
        text = self.tokenizer.decode(tokens.document(document)[0][:60].tolist())
        name = tokens.meta["files"][int(tokens.files[document])]
        return Rejected(name, int(tokens.lines[document]), "truncated_away", reason, text)

    def dataset(self, parts: list[Part], stores: list[Store]) -> PackedDataset:
        """The rows as the loader reads them."""
        config, tokenizer = self.config, self.tokenizer
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        fixed = config.packing != "none" or config.padding == "seq_len"
        return PackedDataset(
            stores,
            self.config.mixture(),
            sources=[part.number for part in parts],
            pad_id=pad,
            row_len=config.seq_len if fixed else None,
            pad_to_multiple_of=config.pad_to_multiple_of,
            pictures=None if self.pictures is None else self.pictures.reader(),
            cross_documents=config.cross_documents,
        )


def _long_report(
    seq_len: int, choice: LongDocuments, pieces: Pieces, kept: np.ndarray, lengths: np.ndarray
) -> LongReport:
    """Return the report on long documents. `kept`: indices of the pieces with a label."""
    is_long = lengths > seq_len
    return LongReport(
        choice,
        seq_len=seq_len,
        longest=int(lengths.max(initial=0)),
        length_of_most=int(np.quantile(lengths, KEEP_MOST, method="higher")) if len(lengths) else 0,
        num_documents=int(is_long.sum()),
        num_tokens=int(lengths[is_long].sum()),
        tokens_lost=int(lengths.sum() - (pieces.length - (pieces.start > 0))[kept].sum()),  # they overlap by one
        pieces_without_labels=len(pieces.length) - len(kept),
    )
