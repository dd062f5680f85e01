"""A helper process that computes rewards and can be killed: sympy, regular expressions and users' functions may hang.

Run as a module it is the helper itself: it answers requests on a socket whose descriptor is its only argument.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from automodel_cli.rollout.rewards.base import Judged, RewardNode
from automodel_cli.rollout.rewards.inside import kernel

START_SECONDS = 180.0  # to start the helper and import what the reward needs, which counts against nobody's timeout


class Helper:
    """One process, started at its first use and again after it was killed. `confined` (`Reward.confined`): it can then
    compute and nothing else, as far as the kernel has Landlock and seccomp."""

    def __init__(self, *, confined: bool = False) -> None:
        self._confined = confined
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready: set[int] = set()

    def score(self, reward: RewardNode, sample: Judged) -> float | None:
        """What `reward.score(sample)` gives there. Raises RuntimeError with its error, TimeoutError after
        `reward.timeout`."""
        connection = self._connection or self._start()
        if id(reward) not in self._ready:
            self._request(connection, ("prepare", reward), START_SECONDS)
            self._ready.add(id(reward))
        assert reward.timeout is not None
        found: float | None = self._request(connection, ("score", reward, sample), reward.timeout)
        return found

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
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(int(self._confined))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
        theirs.close()
        self._connection = Connection(ours.detach())
        return self._connection

    def _request(self, connection: Connection, request: tuple[Any, ...], seconds: float) -> Any:
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
        if kind == "error":
            raise RuntimeError(str(value))
        return value


def serve(descriptor: int) -> None:
    """Answer requests until the other end closes."""
    connection = Connection(descriptor)
    while True:
        try:
            kind, reward, *rest = connection.recv()
            value = reward.warm_up() if kind == "prepare" else _plain(reward.score(*rest))
            answer = ("value", value)
        except EOFError:
            return
        except Exception as error:  # a function that cannot be imported here, or what a reward raises of a sample
            answer = ("error", f"{type(error).__name__}: {error}")
        connection.send_bytes(json.dumps(answer).encode())


def _plain(score: Any) -> float | None:
    """Of what a reward may return, what goes through the pipe."""
    return None if score is None else float(score)


def confine() -> None:
    """Give up everything but computing and reading. Says so where the kernel does not allow it."""
    sys.dont_write_bytecode = True
    closed = kernel.landlock(["/"], ["/dev/null"]), kernel.filter_calls(own_root=False, own_processes=False)
    if not all(closed):
        print(
            "WARNING: this kernel has no Landlock or no seccomp: a reward that evaluates what a completion says runs "
            "with all rights of this user",
            file=sys.stderr,
        )


if __name__ == "__main__":
    if sys.argv[2] == "1":
        confine()
    serve(int(sys.argv[1]))
