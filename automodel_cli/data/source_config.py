"""One dataset of `data.datasets`: where its rows are, how they are read, and how much of the run they are."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range
from automodel_cli.data.formats.base import DOCUMENTS, Format
from automodel_cli.data.formats.builtin import FORMATS, format_name
from automodel_cli.data.formats.column_mapping import columns_fix
from automodel_cli.data.formats.unused_columns import PICTURES

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal["auto", *FORMATS]  # so that a new format is listed in one place
TxtRows = Literal["file", "paragraph", "line"]


def check_format(fmt: str | Format, columns: dict[str, str]) -> None:
    """Raise for a format without a valid `makes`, and for a column mapping with an unknown field."""
    if isinstance(fmt, str):
        known, reader = {name for each in FORMATS.values() for name in each.fields}, "any format"
        fix = "data.column_mapping='{prompt: question, completion: answer}'"
    else:
        known, reader = set(fmt.fields), f"format {format_name(fmt)}"
        fix = "~data.column_mapping"
        if fmt.makes not in DOCUMENTS:
            choices = ", ".join(DOCUMENTS)
            raise ConfigError(
                f"{format_name(fmt)}.makes={fmt.makes!r} must be one of: {choices}",
                code="invalid_choice",
                keys=("format",),
            )
    names = [*sorted(known), *sorted({PICTURES[0]} - known)]
    for name in columns:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.6)
            hint = f"known fields: {', '.join(names)}"
            if near:
                hint = f"did you mean {near[0]!r}?"
                fix = columns_fix({near[0] if field == name else field: column for field, column in columns.items()})
            raise ConfigError(
                f"column_mapping maps {name!r}, which is not a field of {reader}; write it as field: column; {hint}",
                code="unknown_name",
                keys=("column_mapping",),
                fix=fix,
            )


@dataclass(frozen=True)
class SourceConfig:
    """One dataset of a mixture. The fields are those of `data` for one dataset, and its part of the run.

    - `path` accepts json, jsonl, csv, parquet, arrow and txt files (text files also as .gz and .zst), token files,
      folders and globs of them, a folder written by `datasets.save_to_disk`, URLs of all these, or a hub id. Rows of a
      .txt file have the column `text`.
    - `sampling_weight` decides how often the dataset is drawn, `loss_weight` how much each of its tokens counts. Set
      `sampling_weight` for all datasets or for none. Without it, `epochs` decides how often each sequence is used.
    """

    path: str
    """File (json, jsonl, csv, parquet, arrow, txt; text files also as .gz and .zst), token file of Megatron or nanoGPT
    (.bin), folder or glob of files, saved dataset, URL of them (s3://bucket/rows.jsonl), or hub id."""
    name: str | None = None
    """Configuration of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset or of a saved DatasetDict."""
    format: FormatName | Format = "auto"
    """Format of a row: a name, `auto` (detected from the columns), or a custom format node."""
    column_mapping: dict[str, str] = field(default_factory=dict)
    """Map a field of the format to a column: `{prompt: question}`. An empty column omits an optional field."""
    text_unit: TxtRows = "file"
    """Document unit of a .txt file: the complete `file`, a `paragraph` (between blank lines) or a `line`."""
    sampling_weight: float | dict[str, float] | None = None
    """Share of the tokens of the run, relative to the other datasets. A mapping `{0: 0.8, 1000: 0.2}` sets the weight
    from a step on; before its first step the weight is 0. null: `epochs` decides."""
    loss_weight: float = 1.0
    """Factor of the loss of each label token. The denominator is the weighted number of label tokens of the step."""
    epochs: float = 1.0
    """Passes over this dataset in each epoch of the run: 2 is twice, 0.5 is every second epoch."""
    fill_in_the_middle: bool = True
    """Whether `data.fill_in_the_middle` applies to this dataset. Set false for chats and for text that is no code."""
    validation_path: str | None = None
    """File with validation rows of this dataset, in its format and with its columns. They have their own curve
    (`val_loss_LABEL`)."""
    label: str | None = None
    """Name of this dataset in metrics (`loss_LABEL`). null: from the path."""

    def __post_init__(self) -> None:
        check_format(self.format, self.column_mapping)
        check_range("loss_weight", self.loss_weight, at_least=0, fix="loss_weight=1.0")
        if not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise ConfigError(
                f"epochs={self.epochs} must be finite and greater than 0",
                code="out_of_range",
                keys=("epochs",),
                fix="epochs=1.0, or remove the source",
            )
        if self.sampling_weight is not None and self.epochs != 1:
            raise ConfigError(
                f"epochs={self.epochs:g} cannot be set with sampling_weight, which decides how often the dataset is "
                "drawn",
                code="mutually_exclusive",
                keys=("epochs", "sampling_weight"),
                fix="sampling_weight=null, or epochs=1.0",
            )
        if self.label is not None and not re.fullmatch(r"[\w.-]+", self.label):
            fitting = re.sub(r"[^\w.-]+", "_", self.label) or "data"
            raise ConfigError(
                f"label={self.label!r} must consist of letters, digits and the characters _ . -",
                code="invalid_value",
                keys=("label",),
                fix=f"label={fitting}",
            )
        if isinstance(self.sampling_weight, dict):
            for step, weight in self.sampling_weight.items():
                self._check_weight(str(step), weight)
        elif self.sampling_weight is not None:
            self._check_weight("0", self.sampling_weight)

    def weights_by_step(self) -> dict[int, float]:
        """Return `sampling_weight` by the first step that uses it. Steps are counted from 0."""
        given = self.sampling_weight
        if given is None:
            return {}
        return {int(step): weight for step, weight in given.items()} if isinstance(given, dict) else {0: given}

    def _check_weight(self, step: str, weight: float) -> None:
        if not step.isdecimal() or not (weight >= 0 and math.isfinite(weight)):
            raise ConfigError(
                f"sampling_weight={weight:g} from step {step} is not valid: the step must be a whole number, and the "
                "weight finite and at least 0",
                code="out_of_range",
                keys=("sampling_weight",),
                fix="sampling_weight=1.0",
            )


@dataclass(frozen=True)
class HeldOutSource:
    """A dataset of validation rows, the key that names it, whether its path must stand for one split, and the number of
    its training dataset, -1 for none."""

    source: SourceConfig
    key: str
    whole: bool = False
    number: int = -1
