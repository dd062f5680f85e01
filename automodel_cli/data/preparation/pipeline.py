"""Convert the `data:` section to packed sequences on disk.

`prepare` needs no process group. All ranks may call it at once: a file lock lets one rank build missing entries.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.chat_template import choose_template
from automodel_cli.data.config import DataConfig
from automodel_cli.data.encoding.encode_spec import EncodeSpec
from automodel_cli.data.encoding.infill import InfillSpec, anchored, infill_policy_error, resolve_infill
from automodel_cli.data.encoding.pre_rendered import SAMPLE_ROWS
from automodel_cli.data.encoding.row_encoder import RowEncoder
from automodel_cli.data.encoding.workers import choose_workers
from automodel_cli.data.fill_in_the_middle import refuse_infill
from automodel_cli.data.formats.base import PREFERENCES, DataKind
from automodel_cli.data.formats.builtin import FORMATS, detect_format, find_format, format_name
from automodel_cli.data.formats.column_mapping import check_mapped, picture_columns
from automodel_cli.data.formats.unused_columns import unused_columns
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.storage import PictureTable, PictureWriter
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.data.preparation.indexed import index_tokens
from automodel_cli.data.preparation.kept_shards import KeptShards
from automodel_cli.data.preparation.masked_by import masked_by
from automodel_cli.data.preparation.packed_rows import Store
from automodel_cli.data.preparation.parts import Part, check_names, check_rows, hold_out
from automodel_cli.data.preparation.preparation_progress import PreparationProgress
from automodel_cli.data.preparation.row_packer import RowPacker
from automodel_cli.data.preparation.statistics import (
    DataReport,
    InfillReport,
    LongReport,
    SourceReport,
    SpecialReport,
    UnrolledReport,
)
from automodel_cli.data.preparation.token_shards import TokenShards, remove_shards
from automodel_cli.data.preparation.token_writer import TokenWriter
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import (
    ShardedSource,
    Source,
    TaskSource,
    TokenSource,
    first_rows,
    open_source,
    refuse_tokens,
)
from automodel_cli.data.storage.cache import cache_root, entry_key, get_or_build, tokenizer_fingerprint
from automodel_cli.data.storage.code_fingerprint import fingerprint
from automodel_cli.data.storage.indexed_store import IndexedStore
from automodel_cli.data.storage.memmap_store import PackedStore, TokenStore
from automodel_cli.data.tokenized import pad_or_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str], None]


class Report(Protocol):
    """What the startup summary shows of the data."""

    def lines(self) -> list[str]:
        """Return the lines, without a label."""


@dataclass(frozen=True)
class PreparedData:
    """Data of a run: training and validation sequences, and the report of the preparation."""

    train: PackedDataset
    validation: PackedDataset | None
    report: Report


def prepare_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
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
    kind = data_kind(preferences, row_spec)
    config.check_kind(kind)
    show = progress or (lambda line: print(line, file=sys.stderr))
    builder = DataBuilder(config, tokenizer, kind, tuple(stop_ids), show, pictures, row_spec)
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
        builder.dataset([store for store, _ in packed_train], [part.number for part in train]),
        builder.dataset([store for store, _ in packed_validation], [part.number for part in validation])
        if validation
        else None,
        report,
    )


def data_kind(preferences: bool, row_spec: LabelSpec | GroupSpec | None) -> DataKind:
    """Return the kind of the rows of a recipe."""
    if row_spec is not None:
        return row_spec.kind
    return "preferences" if preferences else "documents"


_ANY_FORMAT: dict[DataKind, str] = {
    "documents": "text",
    "preferences": "unpaired_preference",
    "labeled": "labeled",
    "groups": "retrieval",
}


def _repeats_pictures(stores: Sequence[Store]) -> bool:
    """Return whether a picture is shown more than once, so that a microbatch may show it several times."""
    packed = [store for store in stores if isinstance(store, PackedStore)]
    return any(len(np.unique(store.picture_index)) < len(store.picture_index) for store in packed)


class DataBuilder:
    """Tokenizer, template and cache folder of one preparation."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
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
        parts = [self._tokens(open_source(s, self.root), s) for s in config.train_sources()]
        return [replace(part, number=number) for number, part in enumerate(parts)], self.validation_parts()

    def validation_parts(self) -> list[Part]:
        """Return the sources of validation rows with their tokens."""
        return [
            replace(
                self._tokens(open_source(each.source, self.root, whole=each.whole), each.source), number=each.number
            )
            for each in self.config.validation_sources()
        ]

    def shards(self) -> list[TokenShards]:
        """Return the shards of every dataset that has some and is not tokenized yet.

        With `data.start_after`: those of every training dataset.
        """
        if self.config.start_after is not None:
            return [self._kept(config) for config in self.config.train_sources()]
        sources = [(s, False) for s in self.config.train_sources()]
        sources += [(each.source, each.whole) for each in self.config.validation_sources()]
        found = []
        for config, whole in sources:
            source = open_source(config, self.root, whole=whole)
            if not isinstance(source, ShardedSource) or (self.root / (key := self._key(source, config))).is_dir():
                continue
            if self._is_sharded(source, writer := self.writer(source, config)):
                found.append(TokenShards(self.root, key, source, writer))
        return found

    def _kept(self, config: SourceConfig) -> TokenShards:
        source, key = self._kept_source(config)
        return TokenShards(self.root, key, source, self.writer(source, config))

    def kept_shards(self, config: SourceConfig) -> KeptShards:
        """Return the shards of a dataset that a run reads while later ones are prepared."""
        source, key = self._kept_source(config)
        return KeptShards(self.root / f"{key}.shards", source.name, self.progress)

    def _kept_source(self, config: SourceConfig) -> tuple[ShardedSource, str]:
        source = open_source(config, self.root)
        if not isinstance(source, ShardedSource):
            raise refuse_tokens(config.path)
        return source, self._key(source, config, kept=True)  # another key, because joined shards are removed

    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens."""
        return frozenset({*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder})

    def _key(self, source: Source, config: SourceConfig, **more: Any) -> str:
        return entry_key({"kind": "tokens", **source.ingredients(), **self.settings(config), **more})

    def settings(self, config: SourceConfig) -> dict[str, Any]:
        """Return everything that determines the tokens of a row, as JSON values."""
        ingredients: dict[str, Any] = {
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
            "infill": None if (infill := self._infill(config)) is None else vars(infill),
        }
        if self.pictures is not None:
            rows = self.pictures.rows
            ingredients["pictures"] = [self.pictures.processor.cache_key(), rows.folder, rows.max_pixels, "with grids"]
        return ingredients

    def _infill(self, source: SourceConfig) -> InfillSpec | None:
        """Return the fill-in-the-middle of a dataset. Longer documents than a row are cut, unless all are."""
        config = self.config.fill_in_the_middle
        if config is None or not source.fill_in_the_middle:
            return None
        return resolve_infill(config, self.tokenizer, None if self.config.packing == "wrapped" else self.config.seq_len)

    def _tokens(self, source: Source, config: SourceConfig) -> Part:
        if isinstance(source, TokenSource):
            if self._infill(config) is not None:
                raise refuse_infill(source.name, "tokens instead of text")
            if self.preferences or self.row_spec is not None or self.pictures is not None:
                source.rows()  # raises
            return Part(source, *index_tokens(source, self.tokenizer, self.tokenizer_key, self.config, self.root))
        key = self._key(source, config)
        folder, built = get_or_build(self.root, key, partial(self._write_tokens, source, config, key))
        if self.pictures is not None and (files := PictureTable.open(folder).changed()):
            key = self._key(source, config, picture_files=files)
            folder, built = get_or_build(self.root, key, partial(self._write_tokens, source, config, key))
        if built:
            remove_shards(self.root, key)
        return Part(source, TokenStore.open(folder), key, built)

    def _is_sharded(self, source: Source, writer: TokenWriter) -> TypeGuard[ShardedSource]:
        """Return whether the dataset is tokenized in shards. Rated responses are not, because KTO pairs neighboring
        rows."""
        if writer.meta["kind"] == "judged" or self.pictures is not None or not isinstance(source, ShardedSource):
            return False
        return len(source.shards()) > 1

    def _write_tokens(self, source: Source, config: SourceConfig, key: str, folder: Path) -> None:
        writer = self.writer(source, config)
        workers = choose_workers(self.config.num_workers, source.num_bytes) if self.pictures is None else 0
        if self._is_sharded(source, writer):
            shards = TokenShards(self.root, key, source, writer)
            shards.build(shards.missing(), workers, self.progress)
            unseen = shards.join(folder)
        else:
            progress = PreparationProgress(self.progress, source.name)
            pictures = None if self.pictures is None else PictureWriter(folder)
            unseen = writer.write(folder, source.rows(), num_workers=workers, count=progress.count, pictures=pictures)
        unseen.check()

    def writer(self, source: Source, config: SourceConfig) -> TokenWriter:
        examples = first_rows(source)
        check_mapped(examples, config.column_mapping, source.name)
        if config.format != "auto":
            fmt = find_format(config.format)
        elif examples:
            fmt = detect_format(examples, config.column_mapping, source.name, kind=self.kind)
        else:  # no readable row: any format works, since every row is rejected by its own error
            fmt = FORMATS[_ANY_FORMAT[self.kind]]
        template, data = self.template, self.config
        infill = self._infill(config)
        if infill is not None and fmt.makes != "texts":
            raise refuse_infill(source.name, f"the format {format_name(fmt)}")
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
            infill=infill,
        )
        if (
            infill is not None
            and anchored(self.tokenizer, infill)
            and data.special_tokens_policy not in ("auto", "keep")
        ):
            raise infill_policy_error(self.tokenizer, data.special_tokens_policy)
        encoder = RowEncoder(self.tokenizer, spec, self.pictures)
        encoder.refuse_rendered(first_rows(source, SAMPLE_ROWS), data, source.name)
        pictures = () if self.pictures is None else picture_columns(config.column_mapping)
        meta = {
            "files": source.files,
            "dtype": "uint16" if len(self.tokenizer) <= 2**16 else "int32",
            "kind": fmt.makes if fmt.makes in (*PREFERENCES, "labeled", "groups") else "documents",
            "row_spec": None if self.row_spec is None else vars(self.row_spec),
            "is_text": fmt.makes == "texts",
            "format": format_name(fmt) + (", detected" if config.format == "auto" else ""),
            "masked_by": masked_by(fmt.makes, self.template, self.config),
            "special_choice": spec.special_choice,
            "unused": unused_columns(examples, encoder.reader.columns_read.union(pictures)),
            "has_pictures": self.pictures is not None,
        }
        ignored = tuple(data.ignored_columns)
        return TokenWriter(encoder, source.name, config.column_mapping, ignored, meta, self.special_ids())

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
        packer = RowPacker(config, self.tokenizer, self.keeps_together, choice)
        folder, built = get_or_build(self.root, key, partial(packer.write, part.tokens, part.documents, key))
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
        long = LongReport(**counts["long"])
        long.check_kept(part.source.name, counts["num_documents"])
        joins = len(store.offsets) - 1 - store.num_rows if config.cross_documents else 0
        report = SourceReport(
            name=part.source.name,
            fmt=meta["format"],
            num_rows=meta["num_rows"],
            num_rejected=meta["num_rejected"],
            rejected_codes=dict(Counter(row.code for row in part.tokens.rejected()).most_common()),
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
            long=long,
            use=config.mixture().describe(part.number) if part.number >= 0 else "",
            built=part.built or built,
            unrolled=UnrolledReport(**meta["unrolled"]),
            infill=InfillReport(meta.get("infilled", 0), meta.get("infill_too_long", 0)),
            note=part.source.note,
        )
        return store, report

    def dataset(self, stores: Sequence[Store], numbers: Sequence[int]) -> PackedDataset:
        """The rows as the loader reads them. `numbers`: index in the mixture of each store, -1 for none."""
        config, tokenizer = self.config, self.tokenizer
        fixed = config.packing != "none" or config.padding == "seq_len"
        return PackedDataset(
            stores,
            self.config.mixture(),
            sources=numbers,
            pad_id=pad_or_eos(tokenizer) or 0,
            row_len=config.seq_len if fixed else None,
            pad_to_multiple_of=config.pad_to_multiple_of,
            pictures=None if self.pictures is None else self.pictures.reader(repeated=_repeats_pictures(stores)),
            cross_documents=config.cross_documents,
        )
