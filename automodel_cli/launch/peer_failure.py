"""Errors of collectives whose peer rank ended or hangs, as one readable RunError."""

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
    """Return the RunError for a collective that failed because a peer ended or hangs. None for other errors.

    Every surviving rank raises this error or one that follows from it, such as a checkpoint that cannot be written.
    The log of the rank that ended first contains the cause.
    """
    error = error.__cause__ or error
    text = str(error)
    if not (type(error).__name__ in _CLASSES or (isinstance(error, RuntimeError) and _GLOO in text)):
        return None
    if not _WORDS.search(text):
        return None  # a wrong call or a broken driver: its traceback is more useful
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return RunError(
        f"rank {rank} of {size} on {_host()} lost another rank, which ended or hangs: {_reason(text)}",
        code="rank_failure",
        fix="find the rank that failed first in logs/rank-N.log of the run, then resume from the newest checkpoint: "
        "automodel resume RUN",
    )


def delay_exit_after_peer_failure() -> None:
    """Wait briefly, so that the launcher detects the rank with the original error first."""
    time.sleep(_SECONDS)


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _reason(text: str) -> str:
    """Return the first sentence of a gloo error without its source location, or the first line of another error."""
    match = re.search(r"\.cc:\d+\] (.+?)(?:\. This is|$)", text, flags=re.M)
    return match[1] if match else text.strip().partition("\n")[0]
