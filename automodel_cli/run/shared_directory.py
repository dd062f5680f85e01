"""Check that all ranks share a folder: rank 0 writes a random token and the others read it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError

T = TypeVar("T")
SECONDS_TO_SEE = 10.0
"""A network file system may show a new file late."""


def host() -> str:
    """Return the name of this host, as Slurm uses it if Slurm runs."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def all_gather_values(value: T) -> list[T]:
    """Return the value of every rank. Collective."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def problems(folder: Path) -> list[str]:
    """Return one entry per host that does not share `folder`, or []. Collective."""
    if dist.get_world_size() == 1:
        return []
    word = [secrets.token_hex(8)]
    wrong = _write(folder, word[0]) if dist.get_rank() == 0 else ""
    dist.broadcast_object_list(word, src=0, device=torch.device("cpu"))
    if dist.get_rank() > 0 and not _is_seen(_file(folder, word[0]), word[0]):
        wrong = f"not seen on {host()}"
    messages = [text for text in all_gather_values(wrong) if text]
    if dist.get_rank() == 0:
        with suppress(OSError):
            _file(folder, word[0]).unlink()
    return list(dict.fromkeys(messages))


def require_shared(folder: Path, copied_to: str | None = None) -> None:
    """Raise ConfigError if not all ranks share the run folder. `copied_to`: its upload URL. Collective."""
    messages = problems(folder)
    if not messages:
        return
    path, first = all_gather_values((str(folder.absolute()), host()))[0]
    copied = f", and rank 0 uploads it to {copied_to}" if copied_to else ""
    raise ConfigError(
        f"the run folder {path} on {first} is not the same folder on every host: {'; '.join(messages)}. Every "
        f"rank writes its part of a checkpoint there{copied}",
        code="not_shared",
        keys=("output_dir",),
        fix="start the command on all hosts in a shared folder"
        if copied_to
        else "output_dir=/a/shared/file/system/runs",
    )


def _file(folder: Path, word: str) -> Path:
    return folder / f".automodel-nodes-{word}"


def _write(folder: Path, word: str) -> str:
    """Return why the file could not be written, or an empty string."""
    try:
        _file(folder, word).write_text(word)
    except OSError as error:
        return f"rank 0 cannot write there: {error.strerror}"
    return ""


def _is_seen(path: Path, word: str) -> bool:
    deadline = time.monotonic() + SECONDS_TO_SEE
    while True:
        with suppress(OSError):
            if path.read_text() == word:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
