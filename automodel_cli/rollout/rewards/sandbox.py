"""Run foreign Python code in a subprocess that is limited in time and memory and cut off from network and files.

Linux namespaces do the isolation: network, processes and mounts (the whole file system read-only, a small memory file
system to work in). As root the code becomes a user of its own and has no capabilities. What a machine does not allow is
measured once (`isolation`), never assumed. Reading files that the user may read is not prevented. The code has the
standard library, not the packages of this environment. This module is the
bootstrap too: the child runs it as a plain script, before it becomes the foreign code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import IO

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_REC_PRIVATE, _MS_NOSUID_NODEV, _MS_BIND = 0x4000 | (1 << 18), 2 | 4, 0x1000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_NUM_CAPABILITIES = 64  # more than there are; the kernel ignores the others
_FIRST_UID = 2_000_000_000  # plus the process id: a user of its own for each run, so that its processes can be counted
_OUTPUT_BYTES = 64 * 1024
_START_SECONDS = 20.0  # for the bootstrap itself on a busy machine; the code's own time starts after it
_MARK = "isolation:"


@dataclass(frozen=True)
class Limits:
    """Seconds of wall clock, bytes of address space and of files, and processes.

    The last is not enforced for root on a machine that gives no mount namespace.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 16 * 2**20
    num_processes: int = 32


@dataclass(frozen=True)
class Outcome:
    """How the code ended. `returncode` is 128 + n for signal n, None when time ran out. Outputs are cut off."""

    returncode: int | None
    stdout: str
    stderr: str
    isolation: frozenset[str]

    @property
    def timed_out(self) -> bool:
        return self.returncode is None


def run_python(code: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run `code` as a script of its own in an empty working directory and environment.

    Raises OSError when the sandbox itself could not start.
    """
    limits = limits or Limits()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,  # files, not pipes: what the code leaves running could hold a pipe open
    ):
        os.chmod(folder, 0o755)  # the code runs as another user where it can
        task = json.dumps({"code": code, "stdin": stdin, "folder": folder, "limits": asdict(limits)})
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", __file__],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        expired = False
        try:
            process.communicate(task.encode(), timeout=limits.seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            expired = True
        finally:
            _kill(process)
        head, _, errors = _text(stderr).partition("\n")
        if not head.startswith(_MARK):
            raise OSError(f"the sandbox could not start: {head or 'no answer'}")
        expired = expired or process.returncode == -signal.SIGALRM
        achieved = frozenset(head.removeprefix(_MARK).split())
        return Outcome(None if expired else process.returncode, _text(stdout), errors, achieved)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_OUTPUT_BYTES).decode(errors="replace")


@functools.cache
def isolation() -> frozenset[str]:
    """What this machine lets the sandbox cut off, of `network`, `processes`, `files` and `user`. Measured once."""
    try:
        return run_python("pass").isolation
    except OSError:
        return frozenset()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# From here on: the bootstrap, in the child.


def _main() -> None:
    task = json.load(sys.stdin)
    achieved = _isolate()
    parent = os.getpid()
    child = os.fork()  # the first process of the new process namespace: all others die with it
    if child == 0:
        _become(task, achieved, parent)
    # Not in the child: the first process of a namespace ignores signals of its own. Ours ends it (PR_SET_PDEATHSIG).
    signal.setitimer(signal.ITIMER_REAL, task["limits"]["seconds"])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    signal.setitimer(signal.ITIMER_REAL, 0)
    os._exit(code if code >= 0 else 128 - code)  # as a shell reports a signal


def _isolate() -> set[str]:
    """Leave the namespaces of the machine, as far as it lets us."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if uid != 0:
        if libc.unshare(_CLONE_NEWUSER) != 0:
            return set()
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    achieved = {
        name
        for name, flag in (("network", _CLONE_NEWNET), ("processes", _CLONE_NEWPID), ("files", _CLONE_NEWNS))
        if libc.unshare(flag) == 0
    }
    libc.unshare(_CLONE_NEWIPC)
    if "files" in achieved and not _read_only(libc):
        achieved.discard("files")
    return achieved


def _read_only(libc: ctypes.CDLL) -> bool:
    """Make every mount of this namespace read-only."""
    if libc.mount(None, b"/", None, _MS_REC_PRIVATE, None) != 0:
        return False
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    return libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size) == 0


def _open_interpreter(libc: ctypes.CDLL, folder: str, achieved: set[str]) -> str | None:
    """The interpreter on a path that any user may walk, mounted there: root's own may lie below a closed folder.
    None where it cannot be."""
    prefix, program = os.path.realpath(sys.base_prefix), os.path.realpath(sys.executable)
    if "files" not in achieved or not program.startswith(prefix + "/"):
        return None
    place = f"{folder}/.python"
    os.mkdir(place, 0o755)
    if libc.mount(prefix.encode(), place.encode(), None, _MS_BIND, None) != 0:
        return None
    return place + program.removeprefix(prefix)


def _become(task: dict, achieved: set[str], parent: int) -> None:  # type: ignore[type-arg]
    """Write the code, put on the limits, give up every right, and be the code."""
    libc = ctypes.CDLL(None, use_errno=True)
    if "processes" in achieved:
        os.setsid()  # a signal to its own group must not reach the bootstrap
    limits, folder = task["limits"], task["folder"]
    if "files" in achieved:
        options = f"size={limits['file_bytes']},mode=0777".encode()
        if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID_NODEV, options) != 0:
            achieved.discard("files")
    os.chdir(folder)
    for name in ("code", "stdin"):
        with open(name, "w") as file:
            file.write(task[name])
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    program = sys.executable
    if os.getuid() == 0 and (reachable := _open_interpreter(libc, folder, achieved)) is not None:
        program = reachable
        os.setgroups([])
        os.setgid(_FIRST_UID + parent)
        os.setuid(_FIRST_UID + parent)
        achieved.add("user")
    for capability in range(_NUM_CAPABILITIES):  # root without them cannot undo the mounts
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after setuid, which takes it back
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.write(2, f"{_MARK} {' '.join(sorted(achieved))}\n".encode())
    for kind, value in (
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["num_processes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))
    os.environ.update(HOME=folder, TMPDIR=folder)
    os.execv(program, [program, "-I", "-S", "-B", "code"])


if __name__ == "__main__":
    _main()
