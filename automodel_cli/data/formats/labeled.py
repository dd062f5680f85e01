"""Rows for classifiers: texts with a label, and words with a label each. Torch-free."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.formats.base import FirstRows, Makes
from automodel_cli.data.formats.column_mapping import column_for
from automodel_cli.data.formats.examples import LabeledText
from automodel_cli.data.formats.row_accessor import Fields
from automodel_cli.data.row_errors import RowError


@dataclass(frozen=True)
class LabeledTexts:
    """A text, perhaps with a second one, and its label: a name, an index, a list of them, or a number."""

    pair_template: str = "{text}\n{text_pair}"
    """Text of a row with `text_pair`. Render pairs in the same way when you use the model."""

    name: ClassVar[str] = "labeled"
    fields: ClassVar[tuple[str, ...]] = ("text", "text_pair", "label")
    makes: ClassVar[Makes] = "labeled"

    def __post_init__(self) -> None:
        if "{text}" not in self.pair_template or "{text_pair}" not in self.pair_template:
            raise ConfigError(
                f"pair_template={self.pair_template!r} must contain {{text}} and {{text_pair}}",
                code="invalid_value",
                keys=("pair_template",),
            )

    def detects(self, sample: FirstRows) -> bool:
        return {"text", "label"} <= sample.has

    def read(self, row: Fields) -> LabeledText:
        text, pair = row.text("text"), row.optional_text("text_pair")
        if pair:
            text = self.pair_template.replace("{text}", text).replace("{text_pair}", pair)
        return LabeledText(text, row["label"], row.column("label"))


@dataclass(frozen=True)
class LabeledTokens:
    """Words and a label for each of them, as in data for named entities."""

    name: ClassVar[str] = "labeled_tokens"
    fields: ClassVar[tuple[str, ...]] = ("tokens", "tags")
    makes: ClassVar[Makes] = "labeled"

    def detects(self, sample: FirstRows) -> bool:
        return {"tokens", "tags"} <= sample.has

    def read(self, row: Fields) -> LabeledText:
        words, tags = row["tokens"], row["tags"]
        for field, values in (("tokens", words), ("tags", tags)):
            if not isinstance(values, list) or not values:
                raise RowError("bad_label", f"{row.column(field)} is {values!r:.80}, but must be a list with entries")
        if not all(isinstance(word, str) and word for word in words):
            raise RowError("not_text", f"{row.column('tokens')} must be a list of words")
        if len(words) != len(tags):
            raise RowError("bad_label", f"the row has {len(words)} words and {len(tags)} tags, but needs one for each")
        return LabeledText(tuple(words), tags, row.column("tags"))


def suggest_columns(sample: FirstRows, fields: tuple[str, str]) -> dict[str, str]:
    """Return the likeliest column of each field, for the fix of an error."""
    columns = [c for c in dict.fromkeys(column for row in sample.rows for column in row) if c in sample.shared]
    if (
        fields[0] == "text"
        and any(isinstance(sample.first(column), list) for column in columns)
        and column_for("tokens", columns)
    ):
        fields = ("tokens", "tags")
    found: dict[str, str] = {}
    for field in fields:
        free = [column for column in columns if column not in found.values()]
        near = difflib.get_close_matches(field, free, 1, 0.6)
        found[field] = sample.columns.get(field) or (near[0] if near else column_for(field, free)) or "<column>"
    return found
