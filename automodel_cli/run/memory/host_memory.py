"""Available memory of this host, read from /proc and cgroups."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUPS) -> float | None:
    """Return the bytes that a process can still allocate, within the limit of its cgroup. None without /proc."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), flags=re.M)
    except OSError:
        return None
    free = None if match is None else 1024.0 * int(match[1])
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    left = max(0.0, limit - used + (_cached(cgroup) or 0.0))
    return left if free is None else min(free, left)


def _number(path: Path) -> float | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return float(text) if text.isdecimal() else None


def _cached(cgroup: Path) -> float | None:
    """Return the bytes of file pages that the kernel can reclaim."""
    try:
        match = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), flags=re.M)
    except OSError:
        return None
    return None if match is None else float(match[1])
