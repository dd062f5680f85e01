"""Data files on object storage (`s3://`, `gs://`, `https://`, ...), downloaded once into the data cache.

A download is a cache entry. Its key contains what the storage reports about each file (size and ETag or time), so a
changed file is downloaded again. A file lock lets one rank of a node download while the others wait.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import DataError
from automodel_cli.config.file_systems import package_for
from automodel_cli.config.fix_syntax import override
from automodel_cli.data.sources.remote_path import RemotePath
from automodel_cli.data.storage.cache import entry_key, get_or_build
from automodel_cli.data.token_files.detection import INDEX_SUFFIX, SUFFIX

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::|://)")


def is_url(path: str) -> bool:
    """Whether `path` is a URL for fsspec."""
    return _URL.match(path) is not None


def check_url(url: str) -> None:
    """Raise DataError if the package for such URLs is missing. Without network access."""
    import fsspec

    match = _URL.match(url)
    assert match is not None
    try:
        fsspec.get_filesystem_class(match[1])
    except ImportError as error:
        package = package_for(match[1], error)
        raise DataError(
            f"{url} requires a package that is not installed: {error}",
            code="missing_package",
            keys=("data.path",),
            fix=f"pip install {package}",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url} is not supported, because fsspec has no file system for {match[1]}://",
            code="invalid_value",
            keys=("data.path",),
            fix=override("data.path", "<a file, or a URL of a known file system>"),
        ) from error


def fetch(url: str, root: Path) -> tuple[list[Path], bool]:
    """Return local copies of the files of a URL, and whether it is a folder. A URL may be a glob.

    Raises DataError if there is no such file, or the storage refuses access.
    """
    import fsspec

    check_url(url)
    try:
        fs, path = fsspec.core.url_to_fs(url)
        files, is_folder = _listed(fs, path)
        if files:
            key = entry_key({"kind": "remote", "url": url, "files": [[file, str(fs.ukey(file))] for file in files]})
            folder, _ = get_or_build(root, key, lambda folder: _download(fs, url, files, folder))
    except DataError:
        raise
    except Exception as error:  # each storage library has its own exceptions
        raise unreadable(url, error) from error
    if not files:
        raise DataError(f"{url} does not exist", code="missing_file", keys=("data.path",))
    return [folder / posixpath.basename(file) for file in files if not file.endswith(INDEX_SUFFIX)], is_folder


def listed(url: str) -> tuple[list[RemotePath], bool]:
    """Return the files of a URL in place, and whether it is a folder. Raises DataError as `fetch` does."""
    import fsspec

    check_url(url)
    try:
        fs, path = fsspec.core.url_to_fs(url)
        fs.invalidate_cache()
        files, is_folder = _listed(fs, path)
    except Exception as error:  # each storage library has its own exceptions
        raise unreadable(url, error) from error
    if not files:
        raise DataError(f"{url} does not exist", code="missing_file", keys=("data.path",))
    return [RemotePath.of(fs, file) for file in files], is_folder


def unreadable(url: str, error: Exception) -> DataError:
    """Return the error for a storage that refuses access or cannot be reached."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(
        f"{url} cannot be read: {reason}",
        code="server_rejected",
        keys=("data.path",),
        fix="check the URL, your credentials and the network",
    )


def _listed(fs: AbstractFileSystem, path: str) -> tuple[list[str], bool]:
    """Return the files of a path, each `.bin` with its index, and whether the path is a folder."""
    if any(letter in path for letter in "*?["):
        files, is_folder = [file for file in fs.glob(path) if fs.isfile(file)], False
    elif fs.isfile(path):
        files, is_folder = [path.removesuffix(INDEX_SUFFIX) + SUFFIX if path.endswith(INDEX_SUFFIX) else path], False
    elif fs.isfile(path + SUFFIX) and fs.isfile(path + INDEX_SUFFIX):
        files, is_folder = [path + SUFFIX], False
    elif fs.isdir(path):
        files, is_folder = [file for file in fs.ls(path, detail=False) if fs.isfile(file)], True
    else:
        return [], False
    indices = [file.removesuffix(SUFFIX) + INDEX_SUFFIX for file in files if file.endswith(SUFFIX)]
    return sorted({*files, *(index for index in indices if fs.isfile(index))}), is_folder


def _download(fs: AbstractFileSystem, url: str, files: list[str], folder: Path) -> None:
    names = [posixpath.basename(file) for file in files]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{url} matches files of the same name in several folders: {', '.join(repeated)}",
            code="ambiguous",
            keys=("data.path",),
            fix="list each folder in data.datasets",
        )
    total = sum(fs.size(file) or 0 for file in files)
    print(f"downloading {url}: {len(files)} files, {total / 1e9:.3g} GB", file=sys.stderr, flush=True)
    for file, name in zip(files, names, strict=True):
        fs.get_file(file, str(folder / name))
