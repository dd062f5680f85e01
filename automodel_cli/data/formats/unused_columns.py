"""Detect columns and keys that no code reads. Those that would change training are rejected by name, never dropped.

Columns such as `id` or `source` do not affect training and are only listed in the report. `data.ignored_columns` lists
columns to ignore although they could affect training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.config.name_patterns import NameList, check_entries
from automodel_cli.data.row_errors import RowError, SourceRow

PICTURES = ("images", "image")
"""Columns with the pictures of a row. `data.column_mapping` names another one by the first."""
MEDIA = (*PICTURES, "audio", "audios", "video", "videos")
_WEIGHTS = ("weight", "weights", "loss_weight", "sample_weight", "loss_scale", "loss", "train", "train_detail")
_MASKS = ("input_ids", "labels", "loss_mask", "assistant_masks", "completion_mask", "assistant_mask")
_PARTS = ("system", "tools", "functions", "history", "documents", "chat_template_kwargs")
_REASONING = ("reasoning_content", "reasoning", "thinking")
TRAINING_COLUMNS = frozenset({*MEDIA, *_WEIGHTS, *_MASKS, *_PARTS, *_REASONING, "label", "rejected"})
"""Columns that affect training in any format."""

PREFERENCES = {
    "label": "it judges the response; a recipe for judged responses (kto) reads it",
    "rejected": "a recipe of kind dpo trains on both responses",
}
_MOST_NAMES = 1000
_KEY = re.compile(r"""(?:\.|\[\s*['"]|get\(\s*['"])(\w+)|['"](\w+)['"]\s+(?:not\s+)?in\b""")


@dataclass(frozen=True)
class AllowedKeys:
    """Names that a row may contain in addition to the fields of its format: `ignored` by config, and `of_template`,
    which the chat template reads from a message.
    """

    ignored: frozenset[str] = frozenset()
    of_template: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str | None, ignored: Iterable[str] = ()) -> AllowedKeys:
        """`of_template` are all names that the template text reads from an object."""
        names = _KEY.findall(template or "")
        return cls(frozenset(ignored), frozenset(name for pair in names for name in pair if name))

    def kept(self, item: Mapping[str, object], known: Collection[str], where: str) -> dict[str, object]:
        """Return the message or content part without ignored keys and keys without a value.

        Raises RowError for a key that is neither in `known` nor read by the template.
        """
        kept = {key: value for key, value in item.items() if key in known or not is_empty(value)}
        kept = {key: value for key, value in kept.items() if key not in self.ignored}
        for key in kept:
            if key not in known and key not in self.of_template:
                raise RowError(
                    "unread_key",
                    f"{where} has the key {key!r}, which neither automodel nor the chat template reads",
                    fix=f"data.ignored_columns=[{key}] to train without it{_SYNONYMS.get(key, '')}",
                )
        return kept

    def refuse(self, row: Mapping[str, Any], read: Collection[str], reader: str, columns: Collection[str]) -> None:
        """Raise RowError if the row has one of `columns` that is not read."""
        for column in row.keys() & columns:
            if column not in read and column not in self.ignored and not is_empty(row[column]):
                why = PREFERENCES.get(column, "it would have no effect")
                fix = f"data.ignored_columns=[{column}] to train without it"
                if column in MEDIA:  # the placeholders in the text would be trained literally
                    why = (
                        "recipes of kind vlm, dpo recipes with model.vision={} and evaluation tasks with pictures=true "
                        "read pictures, and here <image> would be text"
                    )
                    fix = "data.on_invalid_row=drop data.max_invalid_fraction=1   (skips the rows that have it)"
                raise RowError(
                    "unread_column", f"the row has the column {column!r}, which {reader} does not read: {why}", fix=fix
                )


class IgnoredNames:
    """Watches rows for the names in `data.ignored_columns`, to detect names that no row has."""

    def __init__(self, ignored: Iterable[str]):
        """`missing`: names that no row had so far. `present`: names of rows seen while a name was missing."""
        self.missing: list[str] = list(ignored)
        self.present: list[str] = []

    def watch(self, origins: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Yield the rows unchanged."""
        for origin in origins:
            if self.missing and not isinstance(origin.row, RowError):
                names = dict.fromkeys(_names_in(origin.row))
                self.missing[:] = [name for name in self.missing if name not in names]
                if len(self.present) < _MOST_NAMES:
                    self.present += names.keys() - set(self.present)
            yield origin


def check_ignored(ignored: Sequence[str], missing: Collection[str], present: Collection[str]) -> None:
    """Raise DataError for a name in `data.ignored_columns` that no row has as a column or as a key inside one."""
    listed = NameList("data.ignored_columns", ignored, "no row has as a column or key")
    check_entries(listed, lambda name: name not in missing, set(present) - set(ignored), error=DataError)


def _names_in(value: object) -> Iterator[str]:
    """Yield the keys of a row, and of the messages and content parts in it."""
    match value:
        case {**columns}:
            yield from map(str, columns)
            for inner in columns.values():
                yield from _names_in(inner)
        case list():
            for inner in value:
                yield from _names_in(inner)


NO_OTHER_KEYS = AllowedKeys()
_SYNONYMS = dict.fromkeys(("loss", "mask", "trainable", "loss_weight"), ", or name it train (true or false)")


def is_empty(value: object) -> bool:
    """Return whether a value is empty. Tables have every key in every row."""
    match value:
        case str() | list() | dict():
            return not value
    return value is None


def unused_columns(rows: Sequence[Mapping[str, Any]], read: Collection[str]) -> list[str]:
    """Return the columns of these rows that are not read, in their order."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return [column for column in columns if column not in read]
