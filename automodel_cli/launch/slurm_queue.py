"""Detect Slurm jobs that were accepted but can never start. Torch-free.

By default Slurm accepts a job that exceeds the limits of its partition, and lets it wait for an administrator.
"""

from __future__ import annotations

import re
import subprocess
import time

_NEVER = re.compile(
    r"Partition(NodeLimit|TimeLimit|Config)|BadConstraints|(Account|QOS)NotAllowed|Invalid(Account|QOS)"
    r"|(Assoc|QOS)Max\w+PerJob\w*"
)
_SECONDS, _POLL = 3.0, 0.3


def why_never(job: str) -> str | None:
    """Return Slurm's reason and the limits of the partition if `job` cannot start, otherwise None."""
    deadline = time.monotonic() + _SECONDS
    while True:
        reason = _answer("squeue", "--noheader", "--jobs", job, "--format=%r").partition("\n")[0].strip()
        if _NEVER.fullmatch(reason):
            return f"{reason}{_limits(job)}"
        if reason not in ("None", "Priority") or time.monotonic() > deadline:  # the scheduler has not looked at it yet
            return None
        time.sleep(_POLL)


def _limits(job: str) -> str:
    name = _answer("squeue", "--noheader", "--jobs", job, "--format=%P").partition("\n")[0].strip()
    shown = _answer("scontrol", "--oneliner", "show", "partition", name) if name else ""
    fields = dict(re.findall(r"(\w+)=(\S+)", shown))
    known = [
        f"{field}={fields[field]}" for field in ("MaxTime", "MaxNodes", "TotalNodes", "TotalCPUs") if field in fields
    ]
    return f" (partition {name}: {', '.join(known)})" if known else ""


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
