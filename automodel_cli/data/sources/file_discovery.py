"""Which files a path of the config names: a file, a folder, a glob, a dataset saved to disk, or none (a hub id)."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.config.fix_syntax import override, word
from automodel_cli.data.sources.compressed import SUFFIXES as COMPRESSED
from automodel_cli.data.sources.remote_files import check_url, is_url

_PLAIN_TABLES = (".jsonl", ".json", ".csv")
TABLES = (*_PLAIN_TABLES, ".parquet", ".arrow", *(f"{name}{c}" for name in _PLAIN_TABLES for c in COMPRESSED))
TEXTS = (".txt", *(f".txt{c}" for c in COMPRESSED))
TOKENS = (".bin",)
SUFFIXES = TABLES + TEXTS + TOKENS
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split names in file names, as separate words between - . _ spaces and digits, as on the hub."""
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that the `datasets` library writes in addition to the rows."""


def local_files(path: str, split: str = "train", *, whole: bool = False) -> list[Path] | None:
    """The files that `path` names (one, a folder's, or a glob's, sorted), or None when it can only be a hub id.

    `split` selects a split of a saved DatasetDict, or of a folder with split names in its file names (`train-0.jsonl`,
    `test.csv`). Other paths have no splits. `whole`: the path must stand for one split. Raises DataError if the
    path looks local and contains no usable file. Files of a URL are not local: their file system is only checked.
    """
    if is_url(path):
        check_url(path)
        return None
    here = Path(path).expanduser()
    if (here / "dataset_dict.json").is_file():
        return _saved(_split_folder(here, split))
    files = _files(path, here)
    if files is not None and here.is_dir() and len(names := _splits(files)) > 1:
        files = _of_split(path, names, split, whole)
    elif files is not None and split != "train":
        raise DataError(
            f"split={split} has no effect on {path}, which has no splits: it applies to hub datasets and a saved "
            "DatasetDict",
            code="no_effect",
            keys=("data.split",),
            fix="data.validation_path=<a file>, or data.path=<the file of this split>",
        )
    for file in files or ():
        if not os.access(file, os.R_OK):
            raise DataError(
                f"{file} cannot be read: permission denied", code="unreadable_file", fix=f"chmod u+r {word(file)}"
            )
    return files


def _files(path: str, here: Path) -> list[Path] | None:
    if (tokens := _tokens(here)) is not None:
        return [tokens]
    if here.is_file():
        return [_supported(here)]
    if (here / "state.json").is_file():
        return _saved(here)
    if here.is_dir():
        return _in_folder(here)
    if glob.has_magic(path):
        matches = sorted(Path(f) for f in glob.glob(str(here), recursive=True) if Path(f).is_file())
        if not matches:
            raise DataError(f"no file matches {path}", code="missing_file", keys=("data.path",))
        return [_supported(f) for f in matches]
    if HUB_ID.match(path) and not path.endswith(SUFFIXES) and not path.startswith("."):
        return None
    names = [f.name for f in here.parent.iterdir()] if here.parent.is_dir() else []
    near = difflib.get_close_matches(here.name, names, 1, 0.6)
    where = f"its folder {here.parent} does not exist" if not here.parent.is_dir() else f"relative to {Path.cwd()}"
    raise DataError(
        f"{path} does not exist ({where})",
        code="missing_file",
        keys=("data.path",),
        fix=override("data.path", str(here.parent / near[0])) if near else None,
    )


def _tokens(here: Path) -> Path | None:
    """Return the `.bin` of a Megatron dataset, which is named by its `.idx` or without a suffix."""
    if here.suffix == ".idx" and (data := here.with_suffix(".bin")).is_file():
        return data
    named = here.with_name(f"{here.name}.bin"), here.with_name(f"{here.name}.idx")
    return named[0] if not here.exists() and all(path.is_file() for path in named) else None


def _in_folder(folder: Path) -> list[Path]:
    """Return all tables of a folder. Token files, and then text files (because of README files), are used only if there
    are no tables.
    """
    return _usable(folder, [f for f in folder.iterdir() if f.is_file() and f.name not in METADATA])


def remote_files(url: str, files: list[Path], split: str, *, is_folder: bool, whole: bool) -> list[Path]:
    """Return the files of a URL that `local_files` would return of the same path. `files`: their local copies."""
    rows = [file for file in files if file.name not in METADATA]
    usable = _usable(url, rows) if is_folder else [_supported(file) for file in files]
    names = _splits(usable)
    return _of_split(url, names, split, whole) if is_folder and len(names) > 1 else usable


def _usable(folder: Path | str, files: Sequence[Path]) -> list[Path]:
    for suffixes in (TABLES, TOKENS, TEXTS):
        if tables := sorted(f for f in files if f.name.endswith(suffixes)):
            return tables
    raise DataError(
        f"the folder {folder} contains no file with one of the suffixes: {', '.join(SUFFIXES)}",
        code="missing_file",
        keys=("data.path",),
    )


def _splits(files: Sequence[Path]) -> dict[str | None, list[Path]]:
    """Return the files of a folder by the split in their names. None: files with no or several split names."""
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        words = set(re.split(r"[-._\s\d]+", file.name.lower()))
        named = [split for split, keywords in SPLITS.items() if words & set(keywords)]
        by_split.setdefault(named[0] if len(named) == 1 else None, []).append(file)
    return by_split


def _of_split(path: str, names: Mapping[str | None, list[Path]], split: str, whole: bool) -> list[Path]:
    """Return the files of one of several splits. Raises DataError if the assignment of files is ambiguous."""
    known = [name for name in names if name is not None]
    listed = ", ".join(f"{files[0].name} ({name or 'no split'})" for name, files in names.items())
    if None in names:
        raise DataError(
            f"some file names of {path} contain a split and others do not: {listed}",
            code="ambiguous",
            keys=("data.path",),
            fix=f"data.path='{_glob(path, names.get(split) or names[known[0]])}'",
        )
    if whole:
        raise DataError(
            f"data.validation_path={path} contains several splits: {listed}",
            code="ambiguous",
            keys=("data.validation_path",),
            fix=f"data.validation_path='{_glob(path, names[known[-1]])}'",
        )
    if split not in names:
        raise DataError(
            f"split={split!r} matches no file of {path}: {listed}",
            code="unknown_name",
            keys=("data.split",),
            fix=f"data.split={known[0]}",
        )
    return names[split]


def _glob(folder: str, files: Sequence[Path]) -> str:
    """A path that names these files."""
    begin = os.path.commonprefix([file.name for file in files])  # noqa: RUF071 (names, not paths)
    return f"{folder.rstrip('/')}/{begin}" + ("*" if len(files) > 1 else "")


def left_out(path: str, files: Sequence[Path]) -> list[str]:
    """Names of the files of a folder that belong to other splits than these."""
    here = Path(path).expanduser()
    if not here.is_dir() or (here / "dataset_dict.json").is_file() or (here / "state.json").is_file():
        return []
    return [file.name for file in _in_folder(here) if file not in files]


def _split_folder(folder: Path, split: str) -> Path:
    """The part of a saved DatasetDict."""
    splits = _metadata(folder / "dataset_dict.json").get("splits", [])
    if split in splits:
        return folder / split
    raise DataError(
        f"split={split!r} of {folder} must be one of: {', '.join(splits) or '(no split)'}",
        code="unknown_name",
        keys=("data.split",),
        fix=f"data.split={splits[0]}" if splits else None,
    )


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of `Dataset.save_to_disk`, in the order of the rows."""
    listed = _metadata(folder / "state.json").get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in listed):
        raise DataError(f"{folder / 'state.json'} does not list the files of a saved dataset", code="damaged_file")
    files = [folder / str(entry["filename"]) for entry in listed]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"{folder} is incomplete: {file.name} is listed in state.json but does not exist", code="missing_file"
            )
    return files


def _metadata(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} of a saved dataset cannot be read: {error}",
            code="unreadable_file" if isinstance(error, OSError) else "damaged_file",
        ) from error
    return content if isinstance(content, dict) else {}


def _supported(path: Path) -> Path:
    if path.name.endswith(SUFFIXES):
        return path
    raise DataError(
        f"the suffix {''.join(path.suffixes) or '(none)'} of {path} must be one of: {', '.join(SUFFIXES)}",
        code="unsupported_file_type",
        keys=("data.path",),
        fix=f"convert the file, or rename it to {path.with_suffix('.jsonl')} if it contains one JSON object per line",
    )
