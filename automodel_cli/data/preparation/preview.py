"""Checks of local data without a tokenizer: the columns of a format, and an upper bound of the number of packed
sequences. Torch-free, for `check` and `submit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.fill_in_the_middle import refuse_infill
from automodel_cli.data.formats.base import DataKind, Format
from automodel_cli.data.formats.builtin import detect_format, find_format, format_name
from automodel_cli.data.formats.column_mapping import LIST_COLUMNS, check_mapped
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.file_discovery import local_files
from automodel_cli.data.sources.file_readers import read_file
from automodel_cli.data.sources.sources import FileSource, TokenSource, first_rows
from automodel_cli.data.synthetic.chat_tasks import ChatTasks
from automodel_cli.data.synthetic.preference_tasks import PreferenceTasks
from automodel_cli.data.token_files.detection import are_token_files, check_token_file

MOST_BYTES = 4 << 20
"""Files that are larger than this in sum are not counted."""


def head_problems(config: DataConfig, *, kind: DataKind, prompts: bool) -> Iterator[ConfigError]:
    """Yield one error for each source whose first rows do not fit the config. Sources on other machines are skipped.

    `prompts`: responses are sampled for the rows.
    """
    places = [("data.path", source) for source in config.train_sources()]
    if config.datasets:
        places = [(f"data.datasets.{i}.path", source) for i, source in enumerate(config.datasets)]
    places += [(each.key, each.source) for each in config.validation_sources() if each.whole]
    for key, source in places:
        try:
            infill = config.fill_in_the_middle is not None and source.fill_in_the_middle
            _check_head(source, whole=key.endswith(".validation_path"), kind=kind, prompts=prompts, infill=infill)
        except DataError as error:
            yield DataError(error.message, code=error.code, keys=(key,), fix=error.fix)


def _check_head(source: SourceConfig, *, whole: bool, kind: DataKind, prompts: bool, infill: bool) -> None:
    paths = local_files(source.path, source.split, whole=whole)
    if not paths:
        return
    if are_token_files(paths):
        for path in paths:
            check_token_file(path)
        tokens = TokenSource(source, paths, Path())
        if infill:
            raise refuse_infill(tokens.name, "tokens instead of text")
        return
    opened = FileSource(source, paths, Path())
    rows = first_rows(opened)
    check_mapped(rows, source.column_mapping, opened.name)
    if rows and not prompts:
        fmt: Format
        if source.format == "auto":
            fmt = detect_format(rows, source.column_mapping, opened.name, kind=kind)
        else:
            fmt = find_format(source.format)
        if infill and fmt.makes != "texts":
            raise refuse_infill(opened.name, f"the format {format_name(fmt)}")


def most_rows(config: DataConfig) -> float | None:
    """Return an upper bound of the packed sequences per epoch, or None if unknown."""
    if isinstance(config.generator, ChatTasks | PreferenceTasks):
        tasks = config.generator.tasks if isinstance(config.generator, PreferenceTasks) else config.generator
        return None if _cuts(config) else tasks.num_train
    if config.generator is not None:
        return None
    if config.mixture().phases:
        return None
    total = 0.0
    for source in config.train_sources():
        paths = local_files(source.path, source.split)
        own_format = not isinstance(source.format, str)  # it may make any number of documents of a row
        if not paths or own_format or are_token_files(paths) or sum(path.stat().st_size for path in paths) > MOST_BYTES:
            return None
        rows = (row for path in paths for _, row in read_file(path, source.text_unit))
        total += source.epochs * sum(_pieces(row, config) for row in rows)
    return total


def _cuts(config: DataConfig) -> bool:
    return config.packing == "wrapped" or config.truncation == "split"


def _pieces(row: Any, config: DataConfig) -> int:
    """Rows that a row of the data fills at most: one for each trained turn, and for each piece of a long text. A token
    is a byte at least.
    """
    if isinstance(row, RowError):
        return 0
    turns = max((_num_turns(row[column]) for column in LIST_COLUMNS if column in row), default=1)
    size = len(str(row).encode("utf-8", "replace"))
    is_cut = _cuts(config) or (config.truncation == "auto" and "text" in {*row, *config.column_mapping})
    return max(1, turns) * (1 + size // config.seq_len if is_cut else 1)


def _num_turns(messages: object) -> int:
    match messages:
        case list():
            return sum(map(_is_turn, messages))
    return 1


def _is_turn(message: object) -> bool:
    match message:
        case {"role": role} | {"from": role}:
            return role not in ("user", "human", "system")
        case {}:
            return True
    return False
