"""Why a checkpoint could not be written or read, from the exceptions of torch."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import TypeVar

import torch.distributed.checkpoint as dcp

from automodel_cli.config.errors import RunError

E = TypeVar("E", bound=BaseException)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_failed(final: Path, error: BaseException, latest: Path | None) -> RunError:
    """Return the error of a failed save, with the free space and the newest complete checkpoint."""
    free = shutil.disk_usage(final.parent).free if final.parent.exists() else 0
    kept = f"The newest complete checkpoint is {latest}" if latest else "No earlier checkpoint exists"
    cause = find_cause(error, OSError)
    full = cause is not None and cause.errno in _DISK_FULL
    return RunError(
        f"checkpoint {final} cannot be written: {reason(error)} ({free / 2**30:.2f} GiB free). {kept}",
        code="disk_full" if full else "unwritable_file",
        keys=("output_dir",),
        fix="free space on this disk, output_dir=<another disk>, or checkpoint.keep_latest_k=1" if full else None,
    )


def reason(error: BaseException) -> str:
    """Return the message of the underlying OSError, or the end of the library message."""
    cause = find_cause(error, OSError)
    if cause is not None and cause.strerror:
        return cause.strerror
    return " ".join(str(error).split())[-300:]


def find_cause(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of a kind inside an exception of torch: a CheckpointException holds one per failed rank."""
    while error is not None:
        if isinstance(error, kind):
            return error
        if isinstance(error, dcp.CheckpointException):
            for inner, _ in error.failures.values():
                if (cause := find_cause(inner, kind)) is not None:
                    return cause
        error = error.__cause__ or error.__context__
    return None
