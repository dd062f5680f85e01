"""Worker process that computes rewards and can be killed: sympy, regular expressions and custom functions may hang.

Run as a module, it is the worker: it answers requests on a socket, whose descriptor is its first argument. A confined
worker (`Reward.confined`) forks for each sample, so that a completion cannot affect other samples.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from automodel_cli.launch.environment import of_user
from automodel_cli.rollout.rewards.base import RewardFunction, RewardInput
from automodel_cli.rollout.rewards.sandbox import linux_isolation, seccomp

_SPARE_SECONDS = 5.0  # for the helper to notice that a worker is out of time
_MOST_BYTES = 1 << 16
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""All that a confined helper has of the environment: keys are none of a completion's business."""
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/zero")
START_SECONDS = 180.0  # to start the worker and import modules of the reward, outside every timeout


class Helper:
    """One process, started on first use and again after it was killed. `confined` (`Reward.confined`): it can only
    compute, if the kernel has Landlock and seccomp."""

    def __init__(self, *, confined: bool = False) -> None:
        self._confined = confined
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready: set[int] = set()

    def score(self, reward: RewardFunction, sample: RewardInput) -> float | None:
        """Return `reward.score(sample)` of the worker. Raises RuntimeError with its error, or TimeoutError after
        `reward.timeout`."""
        connection = self._connection or self._start()
        if id(reward) not in self._ready:
            self._request(connection, ("prepare", reward), START_SECONDS)
            self._ready.add(id(reward))
        assert reward.timeout is not None
        spare = _SPARE_SECONDS if self._confined else 0
        result: float | None = self._request(connection, ("score", reward, sample), reward.timeout + spare)
        return result

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._ready.clear()

    def _start(self) -> Connection:
        parent, child = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(child.fileno()), str(int(self._confined))]
        # It shares the cores with the ranks, and keeps the limit of their threads.
        threads = {name: value for name, value in os.environ.items() if name.startswith("OMP_")}
        everything = of_user() | threads
        env = {n: everything[n] for n in _VARIABLES if n in everything} if self._confined else everything
        env = {**env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(command, pass_fds=[child.fileno()], stdin=subprocess.DEVNULL, env=env)
        child.close()
        self._connection = Connection(parent.detach())
        return self._connection

    def _request(self, connection: Connection, request: tuple[object, ...], seconds: float) -> Any:
        try:
            connection.send(request)
            if not connection.poll(seconds):
                self.close()
                raise TimeoutError(f"no result within {seconds:g} s")
            kind, value = json.loads(connection.recv_bytes())  # never unpickled: a completion may have got to it
        except TimeoutError:
            raise
        except (EOFError, OSError, ValueError, TypeError) as error:
            self.close()
            raise RuntimeError("the helper process died") from error
        if kind == "timeout":
            raise TimeoutError(f"no result within {float(value):g} s")
        if kind == "error":
            raise RuntimeError(str(value))
        return value


def serve_requests(descriptor: int, *, confined: bool) -> None:
    """Answer requests until the other end closes."""
    connection = Connection(descriptor)
    while True:
        try:
            kind, reward, *rest = connection.recv()
            if kind == "score" and confined:
                connection.send_bytes(_in_a_worker(reward, rest[0]))
                continue
            answer = ("value", reward.warm_up() if kind == "prepare" else _plain(reward.score(*rest)))
        except EOFError:
            return
        except Exception as error:  # a function that cannot be imported, or any error of the reward
            answer = ("error", f"{type(error).__name__}: {error}")
        connection.send_bytes(json.dumps(answer).encode())


def _in_a_worker(reward: RewardFunction, sample: RewardInput) -> bytes:
    """Return the answer of a forked process for this sample."""
    reads, writes = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            os.closerange(3, writes)
            os.closerange(writes + 1, 4096)
            _score_and_write(reward, sample, writes)
        finally:
            os._exit(1)
    os.close(writes)
    try:
        return _read_to_the_end(reads, reward.timeout or START_SECONDS)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.close(reads)


def _score_and_write(reward: RewardFunction, sample: RewardInput, writes: int) -> None:
    linux_isolation.end_with_parent()
    confine()
    try:
        answer: tuple[str, float | str | None] = ("value", _plain(reward.score(sample)))
    except Exception as error:
        answer = ("error", f"{type(error).__name__}: {error}"[:2000])
    os.write(writes, json.dumps(answer).encode())
    os._exit(0)


def _read_to_the_end(reads: int, seconds: float) -> bytes:
    """Read the complete output of a process. It is empty if the process was killed or exited."""
    last, output = time.monotonic() + seconds, b""
    while len(output) <= _MOST_BYTES:
        if not select.select([reads], [], [], max(0.0, last - time.monotonic()))[0]:
            return json.dumps(("timeout", seconds)).encode()
        if not (more := os.read(reads, _MOST_BYTES)):
            break
        output += more
    return output or json.dumps(("error", "the process of this sample ended without a score")).encode()


def _plain(score: Any) -> float | None:
    """Convert the result of a reward to a value for the pipe."""
    return None if score is None else float(score)


def confine() -> bool:
    """Drop all permissions except computing and reading files of Python and the system. Return whether the kernel
    supports it."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    readable = [
        *_SYSTEM,
        *(path for path in map(os.path.realpath, (*given, sys.prefix, sys.base_prefix)) if path != "/"),
    ]
    closed = (
        linux_isolation.landlock(readable, ["/dev/null"]),
        seccomp.filter_calls(own_root=False, own_processes=False),
    )
    return all(closed)


def _warn_where_open() -> None:
    """Warn if the kernel cannot confine a process. Tested in a separate process, because permissions cannot be
    regained."""
    tried = os.fork()
    if tried == 0:
        os._exit(0 if confine() else 1)
    if os.waitpid(tried, 0)[1] != 0:
        print(
            "WARNING: this kernel has no Landlock or no seccomp: a reward that evaluates what a completion says runs "
            "with all rights of this user",
            file=sys.stderr,
        )


if __name__ == "__main__":
    if sys.argv[2] == "1":
        _warn_where_open()
    serve_requests(int(sys.argv[1]), confined=sys.argv[2] == "1")
