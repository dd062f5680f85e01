"""When another rank is gone: one sentence that says so, instead of the library's."""

from __future__ import annotations

import os
import re
import socket
import time

from automodel_cli.config.errors import RunError

_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""Of torch.distributed: NCCL and the rendezvous. By name, because this module is imported without torch."""
_WORDS = re.compile(r"ncclRemoteError|timed? ?out|connection (closed|reset|refused)|broken pipe", re.I)
_GLOO = "gloo/transport"
_SECONDS = 2.0


def peer_failure_error(error: BaseException) -> RunError | None:
    """What to tell the user when a collective failed because a rank it needs is gone or stuck; None for other errors.

    Every surviving rank has this error, or one that it caused (a checkpoint that cannot be written); the rank that
    ended first has the reason.
    """
    error = error.__cause__ or error
    text = str(error)
    if not (type(error).__name__ in _CLASSES or (isinstance(error, RuntimeError) and _GLOO in text)):
        return None
    if not _WORDS.search(text):
        return None  # a wrong call or a broken driver: its traceback says more
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return RunError(
        f"rank {rank} of {size} on {_host()} has lost another rank, which ended or hangs: {_reason(text)}",
        fix="find the rank that ended first in logs/rank-N.log of the run; then automodel resume RUN goes on from the "
        "newest checkpoint",
    )


def delay_exit_after_peer_failure() -> None:
    """A survivor waits a moment before it ends: its launcher shall notice the rank with the cause first."""
    time.sleep(_SECONDS)


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _reason(text: str) -> str:
    """gloo's first sentence without the place in its source; the first line of the others."""
    found = re.search(r"\.cc:\d+\] (.+?)(?:\. This is|$)", text, flags=re.M)
    return found[1] if found else text.strip().partition("\n")[0]
