"""Run untrusted Python code in isolated processes: limited time and memory, without network, processes and files.

`linux_isolation.py` uses namespaces with an empty root, or Landlock if namespaces are unavailable, and seccomp in both
cases. The supported isolation is measured once (`isolation`). The code has only the standard library.

A test runs in another process than the code (`grader.py`). The code receives arguments and returns results. The test,
its expected values and its verdict never enter the process of the code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range
from automodel_cli.config.warn import warn
from automodel_cli.rollout.rewards.sandbox.work_folder import work_folder

logger = logging.getLogger(__name__)

_CUT_OFF = ("files", "network", "processes", "memory")
_INSIDE = Path(__file__).parent
_OUTPUT_BYTES = 64 * 1024
_START_SECONDS = 20.0  # for the bootstrap on a busy machine; the time limit of the code starts afterwards
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """Seconds of wall clock, bytes of address space and of files. The code has one process, with up to 256 threads and
    1,024 files, so the first two bound all that it can use of them."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 16 * 2**20


@dataclass(frozen=True)
class SandboxOutcome:
    """How the code ended. `returncode` is 128 + n for signal n, None when time ran out. Outputs are cut off."""

    returncode: int | None
    stdout: str
    stderr: str
    isolation: frozenset[str]

    @property
    def timed_out(self) -> bool:
        return self.returncode is None


@dataclass(frozen=True)
class Verdict:
    """Result of one test, and the reason of a failure."""

    passed: bool
    reason: str = ""


def run_python(code: str, stdin: str = "", limits: Limits | None = None) -> SandboxOutcome:
    """Run `code` as a script in an empty working directory and environment. Raises OSError if the sandbox does not
    start."""
    python = _interpreter()
    return _run({"code": _process([python, "-I", "-S", "-B", "code"], {"code": code, "stdin": stdin}, limits)})


def run_test(code: str, test: str, limits: Limits | None = None, entry_point: str | None = None) -> Verdict:
    """Return whether `code` passes `test`, Python that raises on failure. Each runs in its own process.

    `entry_point` is a name that refers to the code even if Python has a function of this name. Raises OSError if the
    sandbox does not start, and ValueError for a test that cannot run.
    """
    limits = limits or Limits()
    program = [_interpreter(), "-E", "-s", "-S", "-B"]
    protocol = {"protocol.py": _script("protocol")}
    task = json.dumps({"code": code, "test": test, "entry_point": entry_point})
    judging = replace(limits, seconds=2 * limits.seconds + 5)
    outcome = _run(
        {
            "player": _process(
                [*program, "submission.py"], {**protocol, "submission.py": _script("submission"), "stdin": ""}, limits
            ),
            "judge": _process(
                [*program, "grader.py"], {**protocol, "grader.py": _script("grader"), "stdin": task}, judging
            ),
        }
    )
    if outcome.timed_out:
        return Verdict(False, "ran out of time")
    try:
        verdict = json.loads(outcome.stdout)
    except ValueError:
        return Verdict(False, f"the judge ended without a verdict: {outcome.stderr[-500:]}")
    if "broken" in verdict:
        raise ValueError(verdict["broken"])
    return Verdict("passed" in verdict, verdict.get("failed", ""))


@functools.cache
def isolation() -> frozenset[str]:
    """Return the isolation of code on this machine, among `files`, `network`, `processes` and `memory` (beyond its
    limit). Measured once, in a sandboxed process."""
    try:
        return run_python("pass").isolation
    except OSError:
        return frozenset()


def check_memory(memory_mib: int) -> None:
    """Raise ConfigError if `memory_mib` is too small."""
    check_range("memory_mib", memory_mib, at_least=64, note=", which Python itself needs", fix="memory_mib=512")


def require_isolation(*, allow: bool) -> None:
    """Raise ConfigError if this machine cannot isolate generated code. With `allow`, warn instead."""
    lacking = [name for name in _CUT_OFF if name not in isolation()]
    if not lacking:
        logger.info("generated code is isolated from: %s", statement())
        return
    what = f"this machine cannot isolate generated code from {', '.join(lacking)} (its kernel isolates: {statement()})"
    if not allow:
        raise ConfigError(
            what,
            code="not_isolated",
            keys=("allow_unisolated",),
            fix="a machine whose kernel has seccomp, and user namespaces or Landlock (docs/guides/security.md)",
        )
    warn("not_isolated", "%s. CODE RUNS UNISOLATED (allow_unisolated=true): use only models that you trust", what)


def statement() -> str:
    """Return the enforced isolation and its mechanisms as text."""
    try:
        outcome = _run({"code": _process([_interpreter(), "-I", "-S", "-c", "pass"], {"stdin": ""}, None)}, raw=True)
    except OSError as error:
        return f"nothing: {error}"
    how = outcome.isolation
    words = {
        "files": "empty root" if "root" in how else "Landlock" if "landlock" in how else None,
        "network": " and ".join(w for w, k in (("seccomp", "seccomp"), ("a network namespace", "netns")) if k in how),
        "processes": " and ".join(w for w, k in (("seccomp", "seccomp"), ("a process namespace", "pidns")) if k in how),
        "memory": "one process (seccomp) with a limit" if "seccomp" in how else None,
    }
    cut = _cut_off(how)
    return ", ".join(f"{name}: {words[name] if name in cut else 'OPEN'}" for name in words)


def _cut_off(how: frozenset[str]) -> frozenset[str]:
    """Return what the mechanisms enforce together."""
    files = "root" in how or {"landlock", "seccomp", "user"} <= how
    return frozenset(
        name
        for name, holds in {
            "files": files,
            "network": "seccomp" in how or {"netns", "root"} <= how,
            "processes": {"pidns", "root"} <= how or ("seccomp" in how and files),
            "memory": "seccomp" in how,
        }.items()
        if holds
    )


@functools.cache
def _script(name: str) -> str:
    return (_INSIDE / f"{name}.py").read_text()


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


@functools.cache
def _visible() -> list[str]:
    """Return the files that the code can read: system libraries and this interpreter with its packages."""
    own = {sys.base_prefix, os.path.dirname(_interpreter()), sysconfig.get_path("stdlib")}
    paths = [p for p in _SYSTEM if os.path.lexists(p)]
    for path in sorted(map(os.path.realpath, own)):
        if path != "/" and not any(path == p or path.startswith(f"{p}/") for p in paths):
            paths.append(path)
    return [*paths, *filter(os.path.exists, _DEVICES)]


def _process(program: list[str], files: dict[str, str], limits: Limits | None) -> dict[str, object]:
    limits = limits or Limits()
    return {
        "program": program,
        "files": files,
        "limits": asdict(limits),
        "visible": _visible(),
        "devices": list(_DEVICES),
    }


def _run(processes: dict[str, dict[str, Any]], *, raw: bool = False) -> SandboxOutcome:
    """Run the processes until the last one ends, and return its outcome. `raw`: name mechanisms instead of their
    effects."""
    last = list(processes)[-1]
    with (
        work_folder() as folder,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,  # files, not pipes: a surviving process could keep a pipe open
        tempfile.TemporaryFile() as ignored,
    ):
        os.chmod(folder, 0o755)  # the code runs as another user if possible
        handles = [stdout.fileno(), stderr.fileno(), ignored.fileno()]
        for name, process in processes.items():
            streams = (stdout, stderr) if name == last else (ignored, ignored)
            process |= {
                "name": name,
                "stdout": streams[0].fileno(),
                "stderr": streams[1].fileno(),
                "inherited": handles,
            }
        bootstrap = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_INSIDE / "bootstrap.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
            pass_fds=handles,
        )
        seconds = max(process["limits"]["seconds"] for process in processes.values())
        output, errors, expired = b"", b"", False
        try:
            task = json.dumps({"processes": processes, "folder": folder}).encode()
            output, errors = bootstrap.communicate(task, timeout=seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            expired = True
        finally:
            _kill(bootstrap)
        if not output and not expired:
            raise OSError(
                f"the sandbox could not start: {errors.decode(errors='replace').strip()[-500:] or 'no answer'}"
            )
        report = json.loads(output) if output else {}
        # common permissions of all processes
        isolation = [frozenset(report.get(name, {}).get("isolation", ())) for name in processes]
        common = frozenset.intersection(*isolation)
        code = report.get(last, {}).get("returncode")
        expired = expired or code == -signal.SIGALRM
        return SandboxOutcome(
            None if expired else code, _text(stdout), _text(stderr), common if raw else _cut_off(common)
        )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_OUTPUT_BYTES).decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    print(statement())
