"""Choose and create the run folder, once for all ranks."""

from __future__ import annotations

import errno
import glob
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import RunError
from automodel_cli.config.security.safe_files import read_regular, replace
from automodel_cli.config.security.trust_store import FILE as TRUST
from automodel_cli.config.security.trust_store import remember
from automodel_cli.launch import rank_process
from automodel_cli.run.config_root import ConfigRoot
from automodel_cli.run.remote.remote_storage import MARK, Remote, fetch, is_url, local_root
from automodel_cli.run.remote.remote_sync import claim, unreachable
from automodel_cli.runs.lock import hold
from automodel_cli.runs.run_record import FILE as RECORD
from automodel_cli.runs.run_record import read_record

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed


def run_directory(root: ConfigRoot, source: Composed, *, make: bool = True, held: ExitStack | None = None) -> Path:
    """Return the folder of a run: the resumed one, an earlier one of its name (`checkpoint.resume=auto`), or a new one.

    With `make` it exists afterwards and holds `config.yaml`, the config with its origins. With `held` no other run gets
    in until that is closed. Raises RunError.
    """
    url = root.output_dir.rstrip("/") if is_url(root.output_dir) else None
    output_dir, name = local_root(url) if url else Path(root.output_dir), root.run_name or source.name
    stored = _stored(url) if url and source.run_dir is None else []
    earlier = runs_called(output_dir, name, stored) if root.goes_on else []
    if source.run_dir is not None:
        folder = source.run_dir
    elif earlier:
        folder = fetch(f"{url}/{earlier[-1].name}", ["checkpoint"]) if earlier[-1].name in stored else earlier[-1]
    else:
        folder = new_run_folder(output_dir, name, make=make, taken=stored)
    try:
        if held is not None:
            held.callback(hold(folder))  # before the config of a run that is going on is replaced
        if make:
            _write_config(folder, source)
    except OSError as error:
        raise _unwritable(folder, "cannot be written", error) from error
    if held is not None and (copy := copy_of(root, folder)) is not None:
        claim(folder, copy)
    return folder


def recreate_run_directory(folder: Path, source: Composed) -> bool:
    """Return whether `folder` was removed during its run. It then exists again, with its `config.yaml`."""
    if (folder / "config.yaml").is_file():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, source)
    except OSError as error:
        raise _unwritable(folder, "was removed during the run and cannot be created again", error) from error
    return True


def _write_config(folder: Path, source: Composed) -> None:
    text = source.to_yaml()
    replace(folder / "config.yaml", text)
    remember(folder, source.trust, text)


def records_before(source: Composed) -> dict[str, bytes | None]:
    """Read config, trust and record of the resumed run before this start overwrites them. None for missing files and
    for a new run."""
    if source.run_dir is None or not (source.run_dir / "config.yaml").is_file():
        return {}
    files = (source.run_dir / name for name in ("config.yaml", TRUST, RECORD))
    return {file.name: read_regular(file) if file.is_file() else None for file in files}


def put_back(folder: Path, records: Mapping[str, bytes | None]) -> None:
    """Undo a start that never began: config and record are as they were, so that a finished run stays finished, and a
    restart does not go on in the folder."""
    with suppress(OSError):  # the original error is more important
        for name, content in records.items():
            if content is None:
                (folder / name).unlink(missing_ok=True)
            else:
                replace(folder / name, content)
    rank_process.forget_run_folder()


def take_away(folder: Path, source: Composed) -> None:
    """Remove the folder of a run that was rejected at its first start. Keeps folders of `submit` and folders with
    results of an earlier start.
    """
    num_starts, metrics = len(read_record(folder).get("attempts", ())), folder / "metrics.jsonl"
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    kept = any((folder / name).exists() for name in (MARK, "checkpoints", "export"))
    if source.run_dir is not None or num_starts > 1 or has_rows or kept:
        return
    rank_process.forget_run_folder()
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()  # if it was the only one


def copy_of(root: ConfigRoot, folder: Path) -> str | None:
    """Return the URL that the run in `folder` is copied to, if `output_dir` is one."""
    return f"{root.output_dir.rstrip('/')}/{folder.name}" if is_url(root.output_dir) else None


def _stored(url: str) -> list[str]:
    """Return the existing names below `url`. Raises RunError."""
    try:
        return Remote(url).folders()
    except Exception as error:  # whatever the storage's library raises
        raise unreachable(url, error) from error


def runs_called(output_dir: Path, name: str, stored: Sequence[str] = ()) -> list[Path]:
    """Return the folders of runs with this name, oldest first: `name`, `name-2`, `name-3`, ... Includes names in
    `stored` without a local folder."""
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    folders = {}
    here = [path for path in output_dir.glob(f"{glob.escape(name)}*") if path.is_dir()]
    for path in [*here, *(output_dir / other for other in stored)]:
        if match := pattern.fullmatch(path.name):
            folders[int(match[1] or 1)] = path
    return [folders[number] for number in sorted(folders)]


def new_run_folder(output_dir: Path, name: str, *, make: bool = True, taken: Sequence[str] = ()) -> Path:
    """Make `output_dir/name`, or the first free `name-N`: a run never writes into another's folder."""
    number = 1
    while True:
        path = output_dir / (name if number == 1 else f"{name}-{number}")
        try:
            if make and path.name not in taken:
                path.mkdir(parents=True)
            elif path.name in taken or path.exists():
                raise FileExistsError
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _unwritable(path, "cannot be created", error) from error


def _unwritable(folder: Path, what: str, error: OSError) -> RunError:
    return RunError(
        f"the run folder {folder} {what}: {error.strerror}",
        code="disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable_file",
        keys=("output_dir",),
        fix="output_dir=/a/writable/folder",
    )
