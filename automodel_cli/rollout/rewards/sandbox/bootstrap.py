"""Start one or two untrusted processes, each in its own sandbox, and report how they ended.

The task is read from stdin (see `host.py`), the report is written to stdout. Two processes (`player` and `judge`)
share only a socket pair.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import linux_isolation  # in the folder of this script, like seccomp
import seccomp

_MAX_THREADS = 256
_LOOK_SECONDS = 0.005
_TOO_MUCH = 128 + signal.SIGXFSZ
_PATIENCE = 60.0  # seconds until the first request of the judge, with which the time limit of the player starts


def main() -> None:
    task = json.load(sys.stdin)
    os.umask(0o022)
    player_socket, judge_socket = socket.socketpair()
    links = dict(zip(("player", "judge"), (player_socket.fileno(), judge_socket.fileno()), strict=True))
    ends, processes = {}, {}
    for name in task["processes"]:
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            linux_isolation.end_with_parent()
            os.close(reads)
            for other, link in links.items():
                if other != name:
                    os.close(link)  # else nobody would see that the other side has ended
            _guard(task["processes"][name], task["folder"], links.get(name), writes)
        os.close(writes)
        ends[name], processes[name] = reads, pid
    player_socket.close()
    judge_socket.close()
    report: dict[str, Any] = {}
    last = list(processes)[-1]
    for name in (last, *processes):  # the judge decides, so the exit of the player does not matter
        if name in report:
            continue
        if name != last:
            os.kill(processes[name], signal.SIGKILL)
        achieved = b""
        while chunk := os.read(ends[name], 4096):
            achieved += chunk
        _, status = os.waitpid(processes[name], 0)
        code = os.waitstatus_to_exitcode(status)
        report[name] = {"returncode": code, "isolation": achieved.decode().split()}
    json.dump(report, sys.stdout)


def _guard(process: dict[str, Any], folder: str, link: int | None, report: int) -> None:
    """Leave the machine, start the process as the first of its namespace, and end it when its time is over."""
    uid, processes = (
        linux_isolation.own_user(),
        os.open("/proc", os.O_RDONLY | os.O_CLOEXEC),
    )  # a root of our own has no /proc
    achieved = linux_isolation.leave_namespaces(uid)
    work = f"{folder}/{process['name']}"
    os.mkdir(work, 0o755)
    limits = process["limits"]
    if "mountns" in achieved and linux_isolation.empty_root(work, process["visible"], limits["file_bytes"]):
        achieved.add("root")
        work = "/work"
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # for `_watch`
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        _become(process, work, achieved, uid, link, report)
    os.close(report)
    if process["name"] == "player" and link is not None:
        select.select([link], [], [], _PATIENCE)
    if link is not None:
        os.close(link)
    # Not in the child: the first process of a namespace ignores its own signals. The parent ends it (PR_SET_PDEATHSIG).
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
    status = _watch(child, processes, None if "root" in achieved else work, limits["file_bytes"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)  # as a shell reports a signal


def _watch(child: int, processes: int, work: str | None, max_bytes: int) -> int:
    """Wait for a process. Kill it if it has too many threads, or too many files or bytes in `work`. `work` is a folder
    on disk, or None if the kernel limits the files. `processes` is a descriptor of /proc."""
    while True:
        signal.sigtimedwait([signal.SIGCHLD], _LOOK_SECONDS)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        too_large = work is not None and _exceeds(child, work, max_bytes)
        if too_large or _threads(child, processes) > _MAX_THREADS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os._exit(_TOO_MUCH)


def _threads(pid: int, processes: int) -> int:
    try:
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=processes)) as file:
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError):
        return 0


def _exceeds(pid: int, work: str, max_bytes: int) -> bool:
    """Whether the folder, and the removed files that the process still has open, are too large."""
    num_files = num_bytes = 0
    folders = [work]
    while folders:
        try:
            entries = list(itertools.islice(os.scandir(folders.pop()), linux_isolation.MAX_FILES + 1))
            statuses = [entry.stat(follow_symlinks=False) for entry in entries]
        except PermissionError:
            continue  # made so by `mkdir`: the process cannot enter it either
        except FileNotFoundError:
            continue
        except OSError:  # a path that is too long
            return True
        num_files += len(entries)
        num_bytes += sum(512 * status.st_blocks for status in statuses)
        folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        if num_files > linux_isolation.MAX_FILES:
            return True
    device = os.stat(work).st_dev
    for name in _names(f"/proc/{pid}/fd"):
        try:
            status = os.stat(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if status.st_nlink == 0 and status.st_dev == device and stat.S_ISREG(status.st_mode):
            num_bytes += 512 * status.st_blocks
    return num_bytes > 2 * max_bytes  # including the outputs, which have their own limits


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _become(
    process: dict[str, Any], work: str, achieved: set[str], uid: int | None, link: int | None, report: int
) -> None:
    """Write the files, apply the limits, drop all permissions, and execute the program."""
    os.setsid()  # a signal to its own group must not reach the guard
    os.chdir(work)
    for name, text in process["files"].items():
        with open(name, "w") as file:
            file.write(text)
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY
        os.dup2(process[name] if name in process else os.open("stdin", flags), descriptor)
    limits = process["limits"]
    if os.getuid() == 0 and uid is not None and ("root" in achieved or _reachable(process["program"][0])):
        for name in (work, *process["files"]):
            os.chown(name, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        achieved.add("owner")
    if os.getuid() != 0 or uid is None:  # root of a namespace is another user outside; capabilities are dropped below
        achieved.add("user")
    linux_isolation.drop_rights()
    if (
        "root" not in achieved
        and "user" in achieved
        and linux_isolation.landlock(process["visible"], [work, *process["devices"]])
    ):
        achieved.add("landlock")
    for kind, value in (
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        *([(resource.RLIMIT_NPROC, _MAX_THREADS)] if linux_isolation.counts_threads(achieved) else []),
    ):
        resource.setrlimit(kind, (value, value))
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": work, "TMPDIR": work}
    if seccomp.filter_calls(own_root="root" in achieved, own_processes="pidns" in achieved):
        achieved.add("seccomp")
    os.write(report, " ".join(sorted(achieved)).encode())
    os.close(report)
    for descriptor in map(int, process["inherited"]):
        os.set_inheritable(descriptor, False)
    program = [*process["program"], *([] if link is None else [str(link)])]
    if link is not None:
        os.set_inheritable(link, True)
    os.execve(program[0], program, environment)


def _reachable(path: str) -> bool:
    """Whether any user may execute it."""
    parents = [path, *(os.path.dirname(path[: i + 1]) for i, c in enumerate(path) if c == "/" and i)]
    return all(os.stat(p).st_mode & 0o001 for p in parents)


if __name__ == "__main__":
    main()
