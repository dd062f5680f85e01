"""The real command line in a forked copy of a process that has imported torch and transformers already.

`Command(arguments, folder, environ)` is what `python -m automodel_cli ARGUMENTS` would be: `main()` with these
arguments, in this folder, with this environment, its own file descriptors, signal handlers and exit code, and a parent
that waits for it. Left out are the 3-5 CPU seconds of imports of each process. So are they in the ranks that a command
starts, and in those that trace one for a dry run: what it would start as `python -m automodel_cli` is forked from a
copy of it that has run nothing yet, and handed to it as its own child. Whatever else it starts is started as ever.

What a warm process cannot show, cold ones do: which modules a command imports (unit/cli), and a run of one process
and of several ranks (tests/e2e/test_train.py) and under torchrun (tests/e2e/test_nodes.py) from nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import multiprocessing
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import process, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

import automodel_cli
import recipes
from automodel_cli.launch import fork_server

_PR_SET_CHILD_SUBREAPER = 36
_SCRIPTS = ("double.py", "vllm_stand_in.py")
"""Servers of the tests that a run starts: they import what a command does."""
_MODULES = {"automodel_cli": "command", "automodel_cli.dryrun.worker": "trace"}
_PATH = tuple(entry for entry in sys.path if entry)

fork_server.preload(
    "datasets",
    "torch.distributed.launcher.api",
    "tests.warm",
    *(
        module.name
        for package in (automodel_cli, recipes)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(".__main__")
    ),
)


class Command:
    """A command line that runs; what `subprocess.Popen` has of these names means the same here."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        new_session: bool = False,
        stderr_to_stdout: bool = False,
    ) -> None:
        self.args = ["automodel", *arguments]
        self._output = tempfile.TemporaryDirectory(prefix="command-")
        fork_server.start_server()
        context = multiprocessing.get_context("forkserver")
        streams = [f"{self._output.name}/{name}" for name in ("stdout", "stdout" if stderr_to_stdout else "stderr")]
        self._process = context.Process(
            target=_serve, args=(list(arguments), str(folder), dict(environ), streams, new_session)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what it wrote to stdout and stderr."""
        self._process.join(timeout)
        if self.poll() is None:
            self.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *self._texts())
        return self._texts()

    def _texts(self) -> tuple[str, str]:
        paths = (Path(self._output.name, name) for name in ("stdout", "stderr"))
        out, err = (path.read_text() if path.exists() else "" for path in paths)
        return out, err


def run(
    arguments: Sequence[str], folder: Path, environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    command = Command(arguments, folder, environ)
    out, err = command.communicate(timeout)
    assert command.returncode is not None
    return subprocess.CompletedProcess(command.args, command.returncode, out, err)


def _serve(
    arguments: list[str], folder: str, environ: dict[str, str], streams: list[str], new_session: bool
) -> NoReturn:
    """In the forked process: keep a clean copy for what it will start, then be the command."""
    if new_session:
        os.setsid()
    for target, name in enumerate(streams, start=1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, target)
        os.close(file)
    _Forks().install()
    _be_command(arguments, folder, environ)


def _be_command(arguments: list[str], folder: str, environ: Mapping[str, str]) -> NoReturn:
    """What `python -m automodel_cli ARGUMENTS` does from its first line on, to the end of the process."""
    gc.freeze()  # a collection would walk all that was imported before the fork
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    code = 1
    try:
        process.ORIGINAL_DIR = folder  # where processes of its own multiprocessing start
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # the server's, whose descriptor is closed here
        tempfile.tempdir = None  # TMPDIR may be another
        path = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [folder, *path, *(entry for entry in _PATH if entry not in path)]
        sys.argv[:] = ["automodel", *arguments]
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        from automodel_cli.cli.main import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    _leave(code)


def _leave(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Forks:
    """A clean copy of this process that forks what it is asked for, as children of this process.

    It forks twice, and this process adopts what then has no parent (PR_SET_CHILD_SUBREAPER). A fork of the process
    itself would carry along what the command has done by then, and the locks of its threads.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._asking = threading.Lock()  # servers are started together, by threads
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()
        if os.fork() == 0:
            self._socket.close()
            _fork_on_request(theirs, parent)
        theirs.close()

    def install(self) -> None:
        """Take the place of fork and exec for the processes that would import torch again."""
        self._exec, self._spawn = subprocess._fork_exec, util.spawnv_passfds  # type: ignore[attr-defined]
        subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]
        util.spawnv_passfds = self._spawnv_passfds  # type: ignore[attr-defined]

    def _fork_exec(self, *given: Any) -> int:
        args, _, _, _, folder, environ = given[:6]
        streams, new_session = (given[6], given[9], given[11]), given[15]
        words = [os.fsdecode(arg) for arg in args]
        more: list[str] = []
        if words[0] == "env":  # as servers on the GPUs of the ranks are started
            more = list(itertools.takewhile(lambda word: "=" in word, words[1:]))
            words = words[1 + len(more) :]
        module = words[words.index("-m") + 1] if "-m" in words else ""
        is_script = len(words) > 1 and Path(words[1]).name in _SCRIPTS
        if words[:1] != [sys.executable] or not (module in _MODULES or is_script):
            return self._exec(*given)
        kind, arguments = (_MODULES[module], words[words.index("-m") + 2 :]) if module else ("script", words[1:])
        pairs = dict(os.environ)
        if environ is not None:
            pairs = dict(os.fsdecode(pair).split("=", 1) for pair in environ)
        pairs |= dict(pair.split("=", 1) for pair in more)
        files = {target: fd if fd >= 0 else target for target, fd in enumerate(streams)}
        where = os.fsdecode(folder) if folder is not None else os.getcwd()
        return self._request(files, new_session, (kind, arguments, where, pairs))

    def _spawnv_passfds(self, path: bytes, args: list[str], passfds: Sequence[int]) -> int:
        code = os.fsdecode(args[-1])
        if "multiprocessing.forkserver" not in code:
            return self._spawn(path, args, passfds)
        files = {fd: fd for fd in (0, 1, 2, *map(int, passfds))}
        return self._request(files, False, ("server", code, os.getcwd(), dict(os.environ)))

    def _request(self, files: dict[int, int], new_session: bool, task: tuple[str, Any, str, dict[str, str]]) -> int:
        message = pickle.dumps((list(files), new_session, task))
        with self._asking:
            socket.send_fds(self._socket, [len(message).to_bytes(4, "big")], list(files.values()))
            self._socket.sendall(message)
            pid = int.from_bytes(_read(self._socket, 4), "big")
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid()):
            time.sleep(0.001)  # not adopted yet
        return pid


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _fork_on_request(connection: socket.socket, adopter: int) -> NoReturn:
    """The clean copy: one child of `adopter` for each request, until the other end is closed."""
    try:
        while True:
            head, fds, _, _ = socket.recv_fds(connection, 4, 16)
            if len(head) < 4:
                os._exit(0)
            targets, new_session, task = pickle.loads(_read(connection, int.from_bytes(head, "big")))
            reader, writer = os.pipe()
            if (between := os.fork()) == 0:
                if (pid := os.fork()) == 0:
                    connection.close()
                    while os.getppid() != adopter:
                        time.sleep(0.001)
                    _begin(dict(zip(targets, fds, strict=True)), new_session, task)
                os.write(writer, pid.to_bytes(4, "big"))
                os._exit(0)
            os.waitpid(between, 0)
            connection.sendall(os.read(reader, 4))
            for fd in (*fds, reader, writer):
                os.close(fd)
    finally:
        os._exit(1)


def _begin(files: dict[int, int], new_session: bool, task: tuple[str, Any, str, dict[str, str]]) -> NoReturn:
    """In a process that was asked for: its file descriptors and nothing else, then what it is for."""
    above = 1 + max(*files, *files.values())
    for number, fd in enumerate(files.values()):
        os.dup2(fd, above + number)  # out of the way of the targets
    for number, target in enumerate(files):
        os.dup2(above + number, target, inheritable=True)
    keep = sorted({0, 1, 2, *files})
    for low, high in zip(keep, [*keep[1:], 1 << 16], strict=True):
        os.closerange(low + 1, high)
    if new_session:
        os.setsid()
    kind, what, folder, environ = task
    if kind == "command":
        _be_command(what, folder, environ)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    if kind == "trace":
        gc.freeze()
        from automodel_cli.dryrun.worker import main

        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1)  # noqa: SIM115
        _leave(main())
    if kind == "script":
        gc.freeze()
        sys.argv[:] = what
        runpy.run_path(what[0], run_name="__main__")
        _leave(0)
    try:
        exec(what, {})
    finally:
        os._exit(0)
