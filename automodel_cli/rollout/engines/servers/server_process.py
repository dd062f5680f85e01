"""A server process of the run: command, log file and shutdown."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

from automodel_cli.config.errors import RunError
from automodel_cli.config.security.safe_files import open_own
from automodel_cli.launch.environment import of_user
from automodel_cli.rollout.http import Server

_POLL, _GRACE = 0.5, 20.0  # seconds
_TAIL = 2000
_INSTALLATIONS = {
    engine: f"uv venv engine && uv pip install --python engine {engine}   "
    f"(then rollout.engine.servers.executable=engine/bin/{engine} --trust command)"
    for engine in ("vllm", "sglang")
}
"""Commands that install an engine in an environment of its own, because engines pin torch and transformers."""


class ServerProcess:
    """Run `command` in its own process group, without a shell, until it responds to `/health` at `server`.

    Args:
        environment: variables in addition to the user's.
        key: config key that requests the server, for errors.
        elsewhere: fix that uses another address.

    Raises RunError if another server responds at the address, or if `command` ends or does not respond within
    `timeout` seconds. The process is stopped in this case.
    """

    def __init__(
        self,
        command: Sequence[str],
        server: Server,
        log: Path,
        *,
        timeout: float,
        environment: Mapping[str, str] = MappingProxyType({}),
        key: str = "rollout.engine.command",
        elsewhere: str = "rollout.engine.command=null to use it",
    ):
        self._command, self._log, self._asked = shlex.join(command), log, key
        self._url, self._key = server.url, server.api_key
        if answers(self._url, self._key):
            raise RunError(
                f"a server already responds at {server.url}, so {key} started none",
                code="server_mismatch",
                keys=(key,),
                fix=f"end the other server, or {elsewhere}",
            )
        # `env A=1 vllm serve`. With options of env or another PATH, only env knows whether the program exists.
        variables_set = list(takewhile(lambda word: word == "env" or "=" in word, command))
        program = next(iter(command[len(variables_set) :]), "env")
        is_known = not program.startswith("-") and not any(word.startswith("PATH=") for word in variables_set)
        if is_known and shutil.which(program) is None:
            raise RunError(
                f"{key}: `{self._command}` cannot be started, because {program} is not on PATH",
                code="command_failed",
                keys=(key,),
                fix=_INSTALLATIONS.get(program),
            )
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**of_user(), **environment}
        with open_own(log, "a", binary=True) as file:
            try:
                self._process = subprocess.Popen(
                    list(command), stdout=file, stderr=file, env=variables, start_new_session=True
                )
            except OSError as error:
                raise RunError(
                    f"{key}: `{self._command}` cannot be started: {error.strerror}", code="command_failed", keys=(key,)
                ) from error
        try:
            self._wait(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the process group: SIGTERM, then SIGKILL after 20 seconds."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._signal(signal.SIGKILL)  # workers that outlived their parent
        self._process.wait()

    def _signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not answers(self._url, self._key):
            status = self._process.poll()
            if status is not None:
                raise self._failed("server_failed", f"ended with code {status} before it responded")
            if time.monotonic() > deadline:
                raise self._failed(
                    "timeout", f"did not respond within {timeout:g} seconds", fix="rollout.engine.start_timeout=1800"
                )
            time.sleep(_POLL)

    def _failed(self, code: str, what: str, fix: str | None = None) -> RunError:
        tail = self._log.read_text(errors="replace")[-_TAIL:].strip()
        return RunError(
            f"{self._asked}: `{self._command}` {what}. The end of {self._log}:\n{tail}",
            code=code,
            keys=(self._asked,),
            fix=fix,
        )


def answers(url: str, api_key: str | None = None) -> bool:
    """Return whether a server at `url` is healthy."""
    try:
        Server(url, timeout=5.0, retries=0, api_key=api_key).get("/health")
    except RunError:
        return False
    return True
