"""The keys of the `data:` section that name the rows for training and validation. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.formats.base import Format
from automodel_cli.data.json_reader import Row
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.source_config import FormatName, HeldOutSource, SourceConfig, TxtRows


class DatasetGenerator(Protocol):
    """Interface of a node that generates rows in code instead of reading files.

    A node with rows of another format than `messages` has its name as the attribute `format`.
    """

    def rows(self, split: Literal["train", "validation"]) -> Iterable[Row]:
        """Return the rows of one split: dicts, usually with `messages`. Equal `cache_key()` must mean equal rows."""

    def cache_key(self) -> str:
        """Return a text that changes whenever the generated rows would change."""


def answer_checker(
    task: DatasetGenerator | None, rows: Iterable[Mapping[str, object]]
) -> Callable[[str, str], bool] | None:
    """Return `check_answer(completion, answer)` of a generator with verifiable answers in the column `answer`. Runs
    then report an accuracy. None for other generators.
    """
    check: Callable[[str, str], bool] | None = getattr(task, "check_answer", None)
    return check if all("answer" in row for row in rows) else None


@dataclass(frozen=True)
class DataSources:
    """Where the rows for training and validation come from."""

    path: str | None = None
    """File, folder, glob or hub id of the rows. Give exactly one of `path`, `datasets` and `generator`."""
    name: str | None = None
    """Configuration of the hub dataset in `path`."""
    revision: str | None = None
    """Branch, tag or commit of the hub dataset in `path`."""
    split: str = "train"
    """Split of the hub dataset or saved DatasetDict in `path`."""
    format: FormatName | Format = "auto"
    """Format of a row: a name, `auto` (detected from the columns), or a custom format node."""
    column_mapping: dict[str, str] = field(default_factory=dict)
    """Map a field of the format to a column of `path`: `{prompt: question}`. An empty column omits an optional
    field."""
    text_unit: TxtRows = "file"
    """Document unit of a .txt file in `path`: the complete `file`, a `paragraph` or a `line`."""
    datasets: list[SourceConfig] | None = None
    """Dataset mixture: `[{path: a.jsonl, sampling_weight: 0.7}, {path: b.jsonl, sampling_weight: 0.3}]`."""
    generator: DatasetGenerator | None = None
    """Node that generates rows in code."""
    validation_size: float = 0
    """Size of the validation set that is split from the training rows: a fraction below 1, or a number of rows."""
    validation_path: str | None = None
    """File with validation rows, in the format and with the columns of the training rows."""
    validation_split: str | None = None
    """Split of the same hub dataset for validation."""

    def check_origin(self) -> None:
        """Raise ConfigError unless the rows have one origin."""
        given = [key for key in ("path", "datasets", "generator") if getattr(self, key) not in (None, [])]
        if len(given) != 1:
            state = "none is set" if not given else f"{' and '.join(given)} are set"
            raise ConfigError(
                f"exactly one of path, datasets and generator must be set: {state}",
                code="mutually_exclusive" if given else "missing_key",
                keys=tuple(given),
                fix="data.path=train.jsonl",
            )
        single: dict[str, object] = {
            "name": None,
            "revision": None,
            "split": "train",
            "format": "auto",
            "column_mapping": {},
        }
        single["text_unit"] = "file"
        stray = [key for key, default in single.items() if getattr(self, key) != default]
        if stray and self.path is None:
            raise ConfigError(
                f"{', '.join(stray)} cannot be set with {given[0]}: these keys apply to data.path",
                code="requires_setting",
                keys=tuple(stray),
                fix=f"move {stray[0]} into each entry of data.datasets" if self.datasets else f"remove data.{stray[0]}",
            )

    def check_validation(self) -> None:
        """Raise ConfigError for keys of validation rows that do not fit together, or not to the origin."""
        names = ("validation_size", "validation_path", "validation_split")
        given = [key for key in names if getattr(self, key)]
        if self.generator is not None and given:
            raise ConfigError(
                f"{given[0]} has no effect with generator, which generates its own validation rows",
                code="no_effect",
                keys=(given[0],),
                fix=f"data.{given[0]}={0 if given[0] == 'validation_size' else 'null'}",
            )
        if len(given) > 1:
            raise ConfigError(
                f"only one of {', '.join(names)} can be set: {' and '.join(given)} are set",
                code="mutually_exclusive",
                keys=tuple(given),
                fix=" ".join(f"data.{name}={'0' if name == 'validation_size' else 'null'}" for name in given[:-1]),
            )
        own = [i for i, source in enumerate(self.datasets or ()) if source.validation_path]
        if own and given:
            raise ConfigError(
                f"{given[0]} cannot be set with the validation_path of a dataset",
                code="mutually_exclusive",
                keys=(given[0], "datasets"),
                fix=f"data.{given[0]}={'0' if given[0] == 'validation_size' else 'null'}",
            )
        if self.validation_split and self.path is None:
            raise ConfigError(
                f"validation_split={self.validation_split} requires data.path",
                code="requires_setting",
                keys=("validation_split",),
            )
        if self.validation_size < 0 or (self.validation_size > 1 and self.validation_size != int(self.validation_size)):
            raise ConfigError(
                f"validation_size={self.validation_size} must be a fraction below 1 or an integer number of rows",
                code="out_of_range",
                keys=("validation_size",),
                fix="data.validation_size=0.02",
            )

    def train_sources(self) -> list[SourceConfig]:
        """Return the datasets to read. `path` and its keys give a list of one; a generator gives an empty list."""
        if self.datasets:
            return list(self.datasets)
        if self.path is None:
            return []
        return [
            SourceConfig(
                self.path,
                self.name,
                self.revision,
                self.split,
                self.format,
                self.column_mapping,
                text_unit=self.text_unit,
            )
        ]

    def mixture(self) -> Mixture:
        """Return how the datasets are mixed. Raises ConfigError for weights and labels that do not fit together."""
        return Mixture.of(self.train_sources()) if self.datasets else Mixture.single()

    @property
    def has_validation(self) -> bool:
        """Whether rows are held out for validation."""
        is_set = self.validation_size or self.validation_path or self.validation_split
        own = any(source.validation_path for source in self.datasets or ())
        return bool(self.generator is not None or is_set or own)

    def validation_sources(self) -> list[HeldOutSource]:
        """Return the datasets of `validation_path` or `validation_split`, read like the first training dataset, or of
        the `validation_path` of each training dataset."""
        if self.validation_path:
            path = self.validation_path
            source = SourceConfig(
                path, format=self.format, column_mapping=self.column_mapping, text_unit=self.text_unit
            )
            return [HeldOutSource(source, "data.validation_path", whole=True)]
        if self.validation_split:
            return [
                HeldOutSource(replace(self.train_sources()[0], split=self.validation_split), "data.validation_split")
            ]
        return [
            HeldOutSource(
                replace(source, path=source.validation_path, name=None, revision=None, split="train"),
                f"data.datasets.{number}.validation_path",
                whole=True,
                number=number,
            )
            for number, source in enumerate(self.datasets or ())
            if source.validation_path
        ]
