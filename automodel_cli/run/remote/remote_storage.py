"""Run folders on object storage: list, read and download them.

A run works in a local folder (`local_root`), and `run.mirror` copies it to the URL. A checkpoint at the URL is complete
if and only if it has its metadata file, which is written last and removed first. Torch-free. fsspec is imported only if
`output_dir` is a URL.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Collection
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.file_systems import package_for
from automodel_cli.config.security.safe_files import open_own, replace
from automodel_cli.runs.lock import is_held
from automodel_cli.training.checkpoint.directory import META, CheckpointDir, step_of

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINTS, BEST = "checkpoints", "checkpoints/best"
MARK = ".storage"
"""In a local folder: the URL that it is a copy of."""
_RECORDS = ("config.yaml", "run.json", "metrics.jsonl")
_DEPTH = 3
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(folder: str) -> bool:
    return _URL.match(folder) is not None


def check_url(url: str) -> None:
    """Check whether a package for such URLs is installed, without network access. Raises ConfigError."""
    import fsspec

    protocol = _URL.match(url)
    assert protocol is not None
    try:
        fsspec.get_filesystem_class(protocol[1])
    except ImportError as error:
        extra = package_for(protocol[1], error)
        raise ConfigError(
            f"output_dir={url} requires a package that is not installed: {error}",
            code="missing_package",
            keys=("output_dir",),
            fix=f"pip install {extra}, or output_dir=runs",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"output_dir={url} is not supported, because fsspec has no file system for {protocol[1]}://",
            code="invalid_value",
            keys=("output_dir",),
            fix="output_dir=runs",
        ) from error


def local_root(url: str) -> Path:
    """Return the local folder for runs of the URL `output_dir`: a folder of `runs/` named after the URL."""
    return Path("runs") / re.sub(r"[^\w.-]+", "_", url.rstrip("/"))


def reason_of(error: BaseException) -> str:
    """Return one line. Storage libraries raise arbitrary exceptions, often without a text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


@dataclass(frozen=True)
class Remote:
    """A folder at a URL. Methods raise the exceptions of its file system (`reason_of`)."""

    url: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec

        # Object stores have no folders. A file system has, and creates them on request.
        options = {"auto_mkdir": True} if self.url.startswith(("file://", "local://")) else {}
        fs, path = fsspec.core.url_to_fs(self.url.rstrip("/"), use_listings_cache=False, **options)
        return fs, path.rstrip("/")

    def at(self, name: str) -> Remote:
        return Remote(f"{self.url.rstrip('/')}/{name}")

    def folders(self) -> list[str]:
        """Return the names of the entries, including files. [] if the folder does not exist."""
        fs, path = self._opened
        fs.invalidate_cache()
        try:
            return [str(entry).rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def files(self) -> dict[str, int]:
        """Return relative path -> bytes of all files. {} if there are none."""
        fs, path = self._opened
        fs.invalidate_cache()
        entries = fs.find(path, detail=True).items()
        return {name[len(path) + 1 :]: int(info["size"] or 0) for name, info in entries if name.startswith(f"{path}/")}

    def read(self, name: str) -> bytes:
        fs, path = self._opened
        content: bytes = fs.cat_file(f"{path}/{name}")
        return content

    def written(self, name: str) -> float:
        """When, in seconds since 1970."""
        fs, path = self._opened
        modified: datetime = fs.modified(f"{path}/{name}")
        return modified.timestamp()

    def write(self, name: str, content: bytes) -> None:
        fs, path = self._opened
        fs.pipe_file(f"{path}/{name}", content)

    def upload(self, source: Path, name: str) -> None:
        fs, path = self._opened
        fs.put_file(str(source), f"{path}/{name}")

    def download(self, name: str, target: Path) -> None:
        """Write a file atomically."""
        fs, path = self._opened
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            fs.get_file(f"{path}/{name}", str(temporary))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """A file, or all files below a folder."""
        fs, path = self._opened
        fs.rm(f"{path}/{name}", recursive=True)


def checkpoints_in(files: Collection[str]) -> dict[str, bool]:
    """Return the names of the checkpoints among the files of a run -> whether they are complete, oldest first."""
    is_complete: dict[str, bool] = {}
    for file in files:
        top, _, rest = file.partition("/")
        name, _, leaf = rest.partition("/")
        if top == CHECKPOINTS and step_of(Path(name)) is not None:
            is_complete[name] = is_complete.get(name, False) or leaf == META
    return dict(sorted(is_complete.items(), key=lambda item: step_of(Path(item[0])) or 0))


def newest_in(files: Collection[str]) -> str | None:
    """Return the name of the newest complete checkpoint among the files of a run."""
    return next((name for name, is_complete in reversed(checkpoints_in(files).items()) if is_complete), None)


def runs_at(url: str) -> list[str]:
    """Return the URLs of the run at `url`, or of the runs below it. Raises ConfigError and RunError."""
    check_url(url)
    remote = Remote(url.rstrip("/"))
    with _readable(url):
        configs = [name for name in remote.files() if name.rpartition("/")[2] == "config.yaml"]
    folders = [name.rpartition("/")[0] for name in sorted(configs) if name.count("/") <= _DEPTH]
    return [remote.at(folder).url if folder else remote.url for folder in folders]


def records(url: str, target: Path) -> Path:
    """Download the records of the run at `url` into a new folder of `target`. Raises RunError.

    The files keep their remote modification times.
    """
    remote, folder = Remote(url.rstrip("/")), target / Path(url.rstrip("/")).name
    with _readable(url):
        for name in _RECORDS:
            with suppress(FileNotFoundError):
                remote.download(name, folder / name)
                written = remote.written(name)
                os.utime(folder / name, (written, written))
    return folder


@contextmanager
def _readable(url: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever the storage's library raises
        raise RunError(
            f"{url} cannot be read: {reason_of(error)}",
            code="server_unreachable",
            fix="check the network and the credentials",
        ) from error


def fetch(url: str, wanted: Collection[str] = ()) -> Path:
    """Download missing files of the run at `url` and return its local folder.

    Records are always downloaded. If the URL has a newer checkpoint, its records replace the local ones. A folder in
    which a run is training stays unchanged.

    Args:
        wanted: "checkpoint" (the newest complete one and the best one) and "export".

    Raises:
        ConfigError: `url` is not a run.
        RunError: `url` cannot be read.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    folder, remote = (local_root(parent) / name).resolve(), Remote(url.rstrip("/"))
    check_url(url)
    with _one_rank_per_host(folder):
        if folder.is_dir() and is_held(folder):
            return folder
        with _readable(url):
            files = remote.files()
            if "config.yaml" not in files:
                known = [name for name in Remote(parent).folders() if not name.startswith(".")]
                others = f"; {parent} contains: {', '.join(known[:5])}" if known else ""
                raise ConfigError(f"{url} is not a run: it has no config.yaml{others}", code="run_not_found")
            _bring(remote, files, folder, wanted)
    return folder


def _bring(remote: Remote, files: dict[str, int], folder: Path, wanted: Collection[str]) -> None:
    here = CheckpointDir(folder / CHECKPOINTS)
    newest, latest = newest_in(files), here.latest()
    is_newer = newest is not None and (latest is None or (step_of(Path(newest)) or 0) > (step_of(latest) or 0))
    if "checkpoint" in wanted and is_newer and newest is not None:
        best = remote.read(BEST).decode() if BEST in files else newest
        for name in dict.fromkeys([best, newest]):
            if checkpoints_in(files).get(name) and not (here.path / name).is_dir():
                _bring_checkpoint(remote, files, here.path, name)
        if BEST in files and (here.path / best).is_dir():
            link = here.path / "best"
            link.unlink(missing_ok=True)
            link.symlink_to(best)
    for file in files:
        top = file.partition("/")[0]
        if top == CHECKPOINTS or (top == "export" and "export" not in wanted):
            continue
        if is_newer or not (folder / file).exists():
            remote.download(file, folder / file)
    replace(folder / MARK, remote.url)


def _bring_checkpoint(remote: Remote, files: dict[str, int], checkpoints: Path, name: str) -> None:
    temporary = checkpoints / f"{name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        for file in files:
            if file.startswith(prefix := f"{CHECKPOINTS}/{name}/"):
                remote.download(file, temporary / file[len(prefix) :])
        os.rename(temporary, checkpoints / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _one_rank_per_host(folder: Path) -> Iterator[None]:
    """The ranks of one host request a run at the same time: one downloads it, the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open_own(folder.parent / f".{folder.name}.fetch", "w") as file:
        with suppress(OSError):  # no locks here
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
