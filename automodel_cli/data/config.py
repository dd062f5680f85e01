"""The `data:` section of a config. Plain nodes: building one reads no file and imports no torch."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from automodel_cli.config.errors import ConfigError

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "judged"]
Packing = Literal["best_fit", "wrapped", "none"]
LongDocuments = Literal["split", "truncate", "drop", "fail"]
Mask = Literal["assistant", "last_turn", "all"]

FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "tools"),
    "sharegpt": ("messages", "system", "tools"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "prompt_completion": ("prompt", "completion", "system", "tools"),
    "text": ("text",),
}
"""What each format reads from a row; `columns` maps these names to the columns of the data."""
PREFERENCE_FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "messages", "chosen", "rejected", "system", "tools"),
    "judged": ("prompt", "messages", "completion", "label", "system", "tools"),
}
"""The same for rows with preferences, which only recipes of kind dpo read."""
ALL_FIELDS = {**FIELDS, **PREFERENCE_FIELDS}


class TaskNode(Protocol):
    """A procedural dataset: rows made in code instead of read from files."""

    def rows(self, split: Literal["train", "validation"]) -> Any:
        """The rows of one split: dicts with `messages`; the same ones for the same `cache_key()`."""

    def cache_key(self) -> str:
        """Text that changes whenever the generated rows would."""


def check_columns(columns: dict[str, str], key: str) -> None:
    """Refuse a column map that names a field no format reads."""
    known = sorted({name for names in ALL_FIELDS.values() for name in names})
    for name in columns:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}"
            raise ConfigError(
                f"{key} maps {name!r}, which no format reads; {hint} (columns maps a field to its column)",
                keys=(key,),
                fix="data.columns='{prompt: question, completion: answer}'",
            )


@dataclass(frozen=True)
class SourceConfig:
    """One dataset of a mixture.

    `path`: a file (json, jsonl, csv, parquet, arrow; .gz of the text ones), a folder or glob of them, or a hub id;
    `name`, `revision` and `split` belong to hub datasets. `columns` maps a field of the format to a column, for example
    `{prompt: question, completion: answer}`; an empty column name leaves an optional field out (`{tools: ""}`).
    `weight` is how often each row of this source is seen per epoch: 2 is twice, 0.5 is every second epoch.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    format: Format = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(
                f"weight={self.weight} must be above 0: it is how often each row is seen per epoch",
                keys=("weight",),
                fix="weight=1.0, or remove the source",
            )
        check_columns(self.columns, "columns")


@dataclass(frozen=True)
class DataConfig:
    """Rows to train on, and how they become token rows. Exactly one of `path`, `sources` and `task` says where from.

    Where from. `path, name, revision, split, format, columns` describe one dataset as in `SourceConfig`; `sources` is a
    list of them with weights; `task` is a node that generates rows.

    Validation, at most one of: `validation_rows` taken out of the training rows (below 1: a share; 1 or more: a
    number), `validation_path` (a file, same format and columns), `validation_split` (of the same hub dataset). A task
    brings its own.

    Tokens. `seq_len`: tokens per row. `packing`: `best_fit` (whole documents, best-fit decreasing), `wrapped`
    (documents one after the other, cut at every `seq_len`), `none` (one document per row, padded). `long_documents`:
    what happens to those longer than `seq_len`; `wrapped` cuts everywhere and takes only `split`. `pad_to`: rows of
    unpacked data are padded to the `longest` of their microbatch or to `seq_len`; the length is rounded up to a
    multiple of `pad_multiple`.

    Loss mask. `mask`: `assistant` turns, the `last_turn` only, or `all` tokens. `chat_template`: None takes the
    tokenizer's, `none` renders prompt and completion as they are, anything else is a file or the template's text.

    Bad rows. `on_bad_row`: `fail` lists all of them, `drop` goes on without them, up to the share `max_bad`.
    """

    path: str | None = None
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    format: Format = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    sources: list[SourceConfig] | None = None
    task: Any = None
    validation_rows: float = 0
    validation_path: str | None = None
    validation_split: str | None = None
    seq_len: int = 2048
    packing: Packing = "best_fit"
    long_documents: LongDocuments = "split"
    pad_to: Literal["longest", "seq_len"] = "longest"
    pad_multiple: int = 1
    mask: Mask = "assistant"
    chat_template: str | None = None
    on_bad_row: Literal["fail", "drop"] = "fail"
    max_bad: float = 0.01
    cache_dir: str | None = None
    num_workers: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        self._check_origin()
        self._check_validation()
        self._check_numbers()
        check_columns(self.columns, "columns")

    def _check_origin(self) -> None:
        given = [key for key in ("path", "sources", "task") if getattr(self, key) not in (None, [])]
        if len(given) != 1:
            said = "none is set" if not given else f"{' and '.join(given)} are set"
            raise ConfigError(
                f"data comes from exactly one of path, sources and task; {said}",
                keys=tuple(given),
                fix="data.path=train.jsonl",
            )
        single: dict[str, Any] = {"name": None, "revision": None, "split": "train", "format": "auto", "columns": {}}
        stray = [key for key, default in single.items() if getattr(self, key) != default]
        if stray and self.path is None:
            raise ConfigError(
                f"{', '.join(stray)} describe data.path, but data comes from {given[0]}",
                keys=tuple(stray),
                fix=f"move {stray[0]} into each entry of data.sources" if self.sources else f"remove data.{stray[0]}",
            )

    def _check_validation(self) -> None:
        names = ("validation_rows", "validation_path", "validation_split")
        given = [key for key in names if getattr(self, key)]
        if self.task is not None and given:
            raise ConfigError(f"{given[0]} is set, but a task makes its own validation rows", keys=(given[0],))
        if len(given) > 1:
            raise ConfigError(f"validation comes from one place, but {' and '.join(given)} are set", keys=tuple(given))
        if self.validation_split and self.path is None:
            raise ConfigError(
                "validation_split names a split of data.path, which is not set", keys=("validation_split",)
            )
        if self.validation_rows < 0 or (self.validation_rows > 1 and self.validation_rows != int(self.validation_rows)):
            raise ConfigError(
                f"validation_rows={self.validation_rows} must be a share below 1 or a whole number of rows",
                keys=("validation_rows",),
                fix="data.validation_rows=0.02",
            )

    def _check_numbers(self) -> None:
        if self.seq_len < 2:
            raise ConfigError(f"seq_len={self.seq_len} must be at least 2", keys=("seq_len",), fix="data.seq_len=2048")
        if self.pad_multiple < 1:
            raise ConfigError(f"pad_multiple={self.pad_multiple} must be at least 1", keys=("pad_multiple",))
        if self.packing != "none" and self.pad_to != "longest":
            raise ConfigError(
                f"pad_to={self.pad_to} is for unpacked rows; packed rows always have seq_len tokens",
                keys=("pad_to", "packing"),
                fix="data.packing=none, or remove data.pad_to",
            )
        padded_to_seq_len = self.packing != "none" or self.pad_to == "seq_len"
        if padded_to_seq_len and self.seq_len % self.pad_multiple:
            raise ConfigError(
                f"seq_len={self.seq_len} is not a multiple of pad_multiple={self.pad_multiple}",
                keys=("seq_len", "pad_multiple"),
                fix=f"data.seq_len={-(-self.seq_len // self.pad_multiple) * self.pad_multiple}",
            )
        if self.packing == "wrapped" and self.long_documents != "split":
            raise ConfigError(
                f"packing=wrapped cuts documents at the row's end, so long_documents={self.long_documents} cannot hold",
                keys=("packing", "long_documents"),
                fix="data.long_documents=split, or data.packing=best_fit",
            )
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(
                f"max_bad={self.max_bad} is a share of the rows, 0 to 1", keys=("max_bad",), fix="data.max_bad=0.01"
            )
        if self.num_workers is not None and self.num_workers < 0:
            raise ConfigError(
                f"num_workers={self.num_workers} must be 0 (in this process) or more", keys=("num_workers",)
            )

    def check_kind(self, *, preferences: bool) -> None:
        """Refuse what does not fit rows with preferences, or formats of preferences where plain rows are trained."""
        formats = [self.format, *(source.format for source in self.sources or ())]
        for fmt in formats:
            if fmt != "auto" and (fmt in PREFERENCE_FIELDS) != preferences:
                kind = "rows with preferences" if preferences else "plain rows"
                raise ConfigError(
                    f"format={fmt} does not hold {kind}, which this recipe trains on",
                    keys=("data.format",),
                    fix="data.format=auto, or a recipe of the other kind",
                )
        if not preferences:
            return
        if self.packing == "wrapped" or self.long_documents in ("split", "truncate"):
            raise ConfigError(
                f"packing={self.packing} with long_documents={self.long_documents} cuts responses, but the two of a "
                "pair are compared whole and in one row",
                keys=("data.packing", "data.long_documents"),
                fix="data.packing=best_fit data.long_documents=drop",
            )
        if self.mask == "all":
            raise ConfigError(
                "mask=all would compare prompts; only responses are",
                keys=("data.mask",),
                fix="data.mask=assistant",
            )

    def train_sources(self) -> list[SourceConfig]:
        """The datasets to read, `path` and its companions as a list of one; empty for a task."""
        if self.sources:
            return list(self.sources)
        if self.path is None:
            return []
        return [SourceConfig(self.path, self.name, self.revision, self.split, self.format, self.columns)]
