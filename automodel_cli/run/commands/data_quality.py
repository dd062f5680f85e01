"""Implementation of `automodel data quality`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.fix_syntax import word
from automodel_cli.data.encoding.workers import choose_workers
from automodel_cli.data.formats.builtin import FORMATS
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.quality.clean import REMOVED, check_readable, check_target, write_clean
from automodel_cli.data.quality.options import QualityOptions, choose_checks
from automodel_cli.data.quality.overlap import build_index
from automodel_cli.data.quality.quality import measure
from automodel_cli.data.quality.report import report_lines, report_of
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, open_source
from automodel_cli.data.storage.cache import cache_root


def data_quality(
    sources: Sequence[SourceConfig],
    evaluations: Sequence[Source | SourceConfig],
    options: QualityOptions,
    *,
    report: Path | None,
    write: Path | None,
    suffix: str,
    num_workers: int | None,
) -> None:
    """Print the report, and write the rows that stay if `write` is a folder."""
    if write is not None:
        check_target(write)
    try:
        opened = [(config, _opened(config)) for config in sources]
        sets = [_opened(each) if isinstance(each, SourceConfig) else each for each in evaluations]
        index = None
        if sets:
            index = build_index([(source.name, source.files, source.rows()) for source in sets], options.ngram)
        with tempfile.TemporaryDirectory(prefix="automodel-quality-") as folder:
            quality = measure(
                opened,
                options,
                index,
                folder=Path(folder),
                choose_workers=lambda num_bytes: choose_workers(num_workers, num_bytes),
                show=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except ConfigError as error:  # errors of sources name the keys of a config
        raise _of_options(error) from error
    found = report_of(quality)
    print("\n".join(report_lines(found)))
    if write is not None:
        check_readable(quality)
        names = list(Mixture.of(sources).names)
        done = write_clean(quality, names, write, suffix)
        found["written"] = done
        print("\n".join(_written(done, write)))
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def quality_options(checks: tuple[str, ...] | None, *, has_evaluations: bool, **options: Any) -> QualityOptions:
    """Return the settings with their default checks. Raises ConfigError."""
    return QualityOptions(choose_checks(checks, has_evaluations), **options)


def quality_source(
    path: str, name: str | None, split: str, fmt: str = "auto", column: str | None = None, text_unit: Any = "file"
) -> SourceConfig:
    """Return the dataset of `path`. `column`: of the text. Raises ConfigError."""
    if column is not None:
        if fmt not in ("auto", "text"):
            raise ConfigError(
                f"--column {column} is not supported with --format {fmt}",
                code="unsupported_combination",
                keys=("--column", "--format"),
                fix="--format text",
            )
        return SourceConfig(path, name, None, split, "text", {"text": column}, text_unit=text_unit)
    if fmt not in ("auto", *FORMATS):
        raise ConfigError(
            f"--format {fmt} must be one of: auto, {', '.join(FORMATS)}",
            code="invalid_choice",
            keys=("--format",),
            fix="--format auto",
        )
    return SourceConfig(path, name, None, split, fmt, text_unit=text_unit)


def _opened(config: SourceConfig) -> Source:
    return open_source(config, cache_root(None))


def _written(done: dict[str, dict[str, int]], folder: Path) -> list[str]:
    removed = ", ".join(f"{reason} {number:,}" for reason, number in done["removed"].items() if number)
    files = list(done["kept"])
    lines = [f"kept      {number:,} rows in {folder / name}" for name, number in done["kept"].items()]
    lines.append(f"removed   {removed or 'nothing'}; rows and reasons in {folder / REMOVED}")
    key = "data.path={}" if len(files) == 1 else "data.datasets.{number}.path={}"
    paths = [key.format(word(folder / name), number=number) for number, name in enumerate(files)]
    return [*lines, f"next      {' '.join(paths)}"]


def _of_options(error: ConfigError) -> ConfigError:
    """Return the error with options of this command instead of keys of a config."""
    if not isinstance(error, DataError) or error.fix is None:
        return error
    options = {"split": "--split ", "name": "--name ", "format": "--format ", "text_unit": "--text-unit ", "path": ""}
    fix = re.sub(r"\bdata\.(split|name|format|text_unit|path)=", lambda key: options[key[1]], error.fix)
    fix = re.sub(r"data\.column_mapping='?\{(\w+): ?([^,}]+)\}'?", r"--format \1 --column \2", fix)
    return DataError(error.message, code=error.code, keys=error.keys, fix=fix)
