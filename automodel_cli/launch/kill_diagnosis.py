"""Diagnose SIGKILL: read the kernel log and the memory counters of the control group."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the kernel's own limit of one record


@dataclass(frozen=True)
class Evidence:
    """`by`: sender of the signal. `source`: log with the evidence. `out_of_memory`: only if the kernel reports it."""

    out_of_memory: bool
    by: str
    source: str | None = None


class MemoryWatch:
    """Out-of-memory kills from now on: in the kernel log and in the counter of the control group.

    Earlier log entries are ignored, because they may concern other processes with the same ids.
    """

    def __init__(self) -> None:
        self._log = _end_of_log()
        self._records: list[str] = []
        self._file = _counter()
        self._before = _kills(self._file)

    def why(self, pid: int) -> Evidence:
        """Return the evidence on the SIGKILL that ended process `pid`."""
        if self._log is not None:
            self._records += _records_after(self._log)
        for record in reversed(self._records):
            if re.search(rf"[Kk]illed process {pid} ", record):
                return Evidence(True, "by the kernel's out-of-memory killer", f"kernel: {record}")
        now = _kills(self._file)
        if self._file is not None and now is not None and self._before is not None and now > self._before:
            evidence = f"{self._file}: oom_kill rose from {self._before} to {now}{_limit(self._file.parent)}"
            return Evidence(True, "by the kernel: the memory limit of its control group was reached", evidence)
        log = (
            "says nothing of it"
            if self._log is not None
            else "cannot be read here: dmesg -T | grep -i 'killed process'"
        )
        return Evidence(
            False, f"by a person, a scheduler, or the kernel's out-of-memory killer (the kernel's log {log})"
        )


def _counter() -> Path | None:
    """Return the file with `oom_kill N` of this process's group: cgroup v2, then v1. Inside a container, this group is
    the root of the mounted hierarchy.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {kind: path.lstrip("/") for _, kind, path in (line.split(":", 2) for line in lines)}
    candidates = [_CGROUPS / groups.get("", "") / "memory.events", _CGROUPS / "memory.events"]
    candidates += [_CGROUPS / "memory" / groups.get("memory", "") / "memory.oom_control"]
    candidates += [_CGROUPS / "memory" / "memory.oom_control"]
    return next((path for path in candidates if _kills(path) is not None), None)


def _kills(path: Path | None) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)", path.read_text(), flags=re.M) if path is not None else None
    except OSError:
        return None
    return int(match[1]) if match else None


def _limit(group: Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            limit = (group / name).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal() and int(limit) < 1 << 60:  # v1 writes a huge number for none
            return f", its limit is {int(limit) / 2**30:.1f} GiB"
    return ""


def _end_of_log() -> int | None:
    """Return a descriptor at the end of the kernel log, or None without permission."""
    try:
        descriptor = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor


def _records_after(descriptor: int) -> Iterator[str]:
    """Yield the texts of the kernel's records since the last read one, oldest first."""
    while True:
        try:
            record = os.read(descriptor, _RECORD_BYTES).decode(errors="replace")
        except BrokenPipeError:  # the oldest ones were overwritten in the meantime
            continue
        except OSError:  # no more
            return
        yield record.partition(";")[2].partition("\n")[0]
