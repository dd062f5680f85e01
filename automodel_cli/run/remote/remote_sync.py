"""Background upload of a run folder to a URL during training."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.safe_files import replace
from automodel_cli.config.security.trust_store import FILE as TRUST
from automodel_cli.run.remote.remote_storage import (
    BEST,
    CHECKPOINTS,
    MARK,
    Remote,
    checkpoints_in,
    newest_in,
    reason_of,
)
from automodel_cli.training.checkpoint.directory import META, CheckpointDir, step_of

_NEVER = frozenset({TRUST, MARK, ".lock", "job.sbatch"})
_RETRY_SECONDS = 30.0
_STALL_SECONDS = 600.0
"""At the end of a run: how long no file may be finished."""
_LAST_TRIES = (2.0, 8.0)
"""At the end of a run: seconds before each further try."""


def claim(folder: Path, url: str) -> None:
    """Reserve `url` for the run in `folder`, and test write access before training.

    Raises RunError if the URL is not writable, contains another run, or has a newer checkpoint than `folder`.
    """
    remote, mark = Remote(url), folder / MARK
    try:
        files = remote.files()
        if files and not (mark.is_file() and mark.read_text() == url):
            raise RunError(
                f"{url} contains another run than {folder}",
                code="resume_conflict",
                keys=("output_dir",),
                fix=f"automodel resume {word(url)}",
            )
        newest, latest = newest_in(files), CheckpointDir(folder / CHECKPOINTS).latest()
        if newest is not None and (latest is None or (step_of(Path(newest)) or 0) > (step_of(latest) or 0)):
            raise RunError(
                f"{url} has {newest}, which is newer than the checkpoints in {folder}",
                code="resume_conflict",
                keys=("checkpoint.resume",),
                fix=f"automodel resume {word(url)}",
            )
        remote.write("config.yaml", (folder / "config.yaml").read_bytes())
    except RunError:
        raise
    except Exception as error:  # whatever the storage's library raises
        raise unreachable(url, error) from error
    replace(mark, url)


def unreachable(url: str, error: BaseException) -> RunError:
    """The user's error about storage that lets nobody write."""
    return RunError(
        f"{url} cannot be written: {reason_of(error)}",
        code="server_unreachable",
        keys=("output_dir",),
        fix="check that the bucket exists and that the credentials may write to it, or output_dir=runs",
    )


class Mirror:
    """Background upload of completed files in `folder` to `url`, at every `notify` and at `finish`.

    Records are uploaded first, then the files of each new checkpoint, and its metadata last. The URL keeps the newest
    `keep` checkpoints (None: all) and the best one.
    """

    def __init__(self, folder: Path, url: str, keep: int | None):
        self._folder, self._remote, self._keep = folder, Remote(url), keep
        self._sent: dict[str, tuple[int, int]] = {}
        self._failure: BaseException | None = None
        self._progress = time.monotonic()
        self._wake, self._is_last = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Something is finished. Returns at once."""
        self._wake.set()

    def finish(self) -> RunError | None:
        """Upload all remaining files and wait. Return the error of an incomplete upload."""
        self._is_last, self._progress = True, time.monotonic()
        self._wake.set()
        self._thread.join(1.0)
        if self._thread.is_alive():
            print(f"uploading to {self._remote.url}: {self._missing()} left", file=sys.stderr, flush=True)
        while self._thread.is_alive() and time.monotonic() - self._progress < _STALL_SECONDS:
            self._thread.join(1.0)
        if self._thread.is_alive():
            return self._error(f"no file was finished within {_STALL_SECONDS:.0f} s")
        return None if self._failure is None else self._error(reason_of(self._failure))

    def _error(self, reason: str) -> RunError:
        return RunError(
            f"{self._missing()} could not be uploaded to {self._remote.url}: {reason}; {self._folder} is complete",
            code="server_unreachable",
            keys=("output_dir",),
            fix=f"automodel resume {word(self._folder)}   (also uploads the missing files)",
        )

    def _missing(self) -> str:
        left = [signature[1] for name, signature in self._finished_files().items() if self._sent.get(name) != signature]
        return f"{len(left)} files of {sum(left) / 2**30:.2f} GiB"

    def _work(self) -> None:
        while True:
            self._wake.wait(_RETRY_SECONDS if self._failure is not None else None)
            self._wake.clear()
            is_last = self._is_last
            self._try()
            if is_last:
                for seconds in _LAST_TRIES:
                    if self._failure is not None:
                        time.sleep(seconds)
                        self._try()
                return

    def _try(self) -> None:
        before, self._failure = self._failure, None
        try:
            self._copy()
        except Exception as error:  # any exception of the storage library: training continues
            self._failure = error
            if before is None:
                warning = f"upload to {self._remote.url} failed and will be retried: {reason_of(error)}"
                print(warning, file=sys.stderr, flush=True)
        else:
            if before is not None:
                print(f"uploads to {self._remote.url} work again", file=sys.stderr, flush=True)

    def _copy(self) -> None:
        here, there = self._finished_files(), self._remote.files()
        is_complete = checkpoints_in(here)
        for name, signature in here.items():
            if not name.startswith(f"{CHECKPOINTS}/"):
                self._send(name, signature)
        for checkpoint in is_complete:
            prefix = f"{CHECKPOINTS}/{checkpoint}/"
            self._copy_checkpoint(prefix, {n: s for n, s in here.items() if n.startswith(prefix)}, there)
        if (best := CheckpointDir(self._folder / CHECKPOINTS).best()) is not None:
            self._remote.write(BEST, best.name.encode())
        self._prune(set(is_complete), best.name if best is not None else None)

    def _copy_checkpoint(self, prefix: str, files: dict[str, tuple[int, int]], there: dict[str, int]) -> None:
        meta = prefix + META
        try:
            content = (self._folder / meta).read_bytes()
            if meta in there and meta not in self._sent and self._remote.read(meta) == content:
                self._sent |= files  # of an attempt before this one
            changed = {n: s for n, s in files.items() if self._sent.get(n) != s and n != meta}
            if changed and meta in there:
                self._remote.remove(meta)  # incomplete until the new metadata is written
            for name, signature in changed.items():
                self._send(name, signature)
            if self._sent.get(meta) != files[meta]:
                self._remote.write(meta, content)
                self._sent[meta] = files[meta]
        except FileNotFoundError:
            if (self._folder / prefix).is_dir():
                raise
            # otherwise it was removed locally in the meantime, as older than the kept ones

    def _send(self, name: str, signature: tuple[int, int]) -> None:
        if self._sent.get(name) == signature:
            return
        try:
            self._remote.upload(self._folder / name, name)
        except FileNotFoundError:
            if (self._folder / name).exists() or name.startswith(f"{CHECKPOINTS}/"):
                raise
            return  # a record that was replaced by another
        self._sent[name] = signature
        self._progress = time.monotonic()

    def _prune(self, here: set[str], best: str | None) -> None:
        is_complete = checkpoints_in(self._remote.files())
        complete = [name for name, is_whole in is_complete.items() if is_whole]
        doomed = [name for name, is_whole in is_complete.items() if not is_whole and name not in here]
        if self._keep is not None:
            doomed += [name for name in complete[: -self._keep] if name != best]
        for name in doomed:
            prefix = f"{CHECKPOINTS}/{name}"
            if is_complete[name]:
                self._remote.remove(f"{prefix}/{META}")
            self._remote.remove(prefix)

    def _finished_files(self) -> dict[str, tuple[int, int]]:
        """Return relative path -> (modification time, bytes) of finished files in the folder."""
        finished = {}
        for root, folders, files in os.walk(self._folder):
            relative = Path(root).relative_to(self._folder)
            if relative == Path(CHECKPOINTS):
                folders[:] = [name for name in folders if step_of(Path(name)) is not None]
                files = []
            folders[:] = [name for name in folders if not name.startswith(".") and ".tmp" not in name]
            for name in files:
                if name in _NEVER or name.endswith(".tmp"):
                    continue
                try:
                    stat = (Path(root) / name).stat()
                except FileNotFoundError:
                    continue
                finished[(relative / name).as_posix()] = stat.st_mtime_ns, stat.st_size
        return finished


@contextmanager
def mirrored(folder: Path, url: str | None, keep: int | None) -> Iterator[Callable[[], None]]:
    """Upload to `url` inside, and yield the function that signals completed files. None disables uploads.

    Raises RunError at the end if the upload is incomplete. If the run failed, the upload error is printed instead.
    """
    if url is None:
        yield lambda: None
        return
    mirror = Mirror(folder, url, keep)
    try:
        yield mirror.notify
    except BaseException:
        if (failure := mirror.finish()) is not None:
            print(failure, file=sys.stderr, flush=True)
        raise
    if (failure := mirror.finish()) is not None:
        raise failure
    print(f"uploaded to {url}", flush=True)
