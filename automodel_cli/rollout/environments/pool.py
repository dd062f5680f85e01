"""Run steps of many environments concurrently, with time limits, retries and error accounting. Torch-free.

One event loop runs in a background thread, from the first step to `close`. Connections and processes of environments
stay open in it. Results are returned in the order of requests.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.rollout.environments.base import EnvironmentNode, Turn
from automodel_cli.rollout.environments.event_loop import LoopThread, in_thread
from automodel_cli.rollout.types import Account, EpisodeEnd, Message

T = TypeVar("T")
Step = Callable[[], object]
"""A step of an environment, or a function that returns an awaitable of one."""

_FIRST_PAUSE = 0.5  # seconds before the first retry, doubled for each further retry


@dataclass(frozen=True)
class Failure:
    """Why a step failed, after all retries."""

    end: EpisodeEnd
    words: str


class EnvironmentPool:
    """The environments of a run, by name. Use as a context manager, or `close` it."""

    def __init__(self, environments: Mapping[str, EnvironmentNode], column: str | None = None):
        """`column` of a row has the name of its environment. None: there is a single environment."""
        self.environments, self._column = dict(environments), column
        self._loop = LoopThread("environments")
        self._places: dict[str, asyncio.Semaphore] = {}
        self._open: set[Future[Any]] = set()
        self._beginning, self._stopped = threading.Lock(), False

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def name_of(self, row: Mapping[str, object]) -> str:
        """The name of the environment that a row plays in."""
        return next(iter(self.environments)) if self._column is None else str(row[self._column])

    def of(self, row: Mapping[str, object]) -> EnvironmentNode:
        """The environment that a row plays in."""
        return self.environments[self.name_of(row)]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the pool's event loop, wait for it, and return its result. Callable from any thread."""
        with self._beginning:
            if self._stopped:
                work.close()
                raise CancelledError
            future = self._loop.begin(work)
            self._open.add(future)
        try:
            return future.result()
        finally:
            self._open.discard(future)

    def stop(self) -> None:
        """Cancel all waiting and future calls of `run`, in any thread, so that a hanging environment does not block
        the end of the run."""
        with self._beginning:
            self._stopped = True
            for future in list(self._open):
                future.cancel()

    def close(self) -> None:
        """Close the environments, then the loop. Abandoned threads are not waited for."""
        for environment in self.environments.values():
            environment.close()
        self._loop.close()

    async def turn(
        self, name: str, messages: Sequence[Message], row: Mapping[str, object], state: object, account: Account
    ) -> Turn | Failure:
        """Return the reply of the environment, or a Failure. First waits for a free slot, which counts against no time
        limit."""
        environment = self.of(row)
        return await self._placed(name, row, partial(environment.step, messages, row, state), account)

    async def ended(self, name: str, row: Mapping[str, object], state: object, account: Account) -> Turn | Failure:
        """The environment's last reward for an episode that ends although it would have gone on."""
        environment = self.of(row)

        async def last() -> Turn:
            return Turn(reward=await environment.ended(state))

        return await self._placed(name, row, last, account)

    async def _placed(self, name: str, row: Mapping[str, object], step: Step, account: Account) -> Turn | Failure:
        environment = self.of(row)
        places = self._places.setdefault(self.name_of(row), asyncio.Semaphore(environment.concurrency))
        async with places:
            began = time.monotonic()
            try:
                return await self._tried(environment, name, step, account)
            finally:
                spent = time.monotonic() - began
                account.seconds += spent
                account.slowest = max(account.slowest, spent)

    async def _tried(self, environment: EnvironmentNode, name: str, step: Step, account: Account) -> Turn | Failure:
        limit, began = environment.episode_timeout, time.monotonic()
        left = math.inf if limit is None else limit - account.seconds
        for attempt in range(environment.retries + 1):
            room = left - (time.monotonic() - began)
            seconds = min(environment.turn_timeout or math.inf, room)
            try:
                if seconds <= 0:
                    raise TimeoutError
                return _checked(await asyncio.wait_for(_called(step), _finite(seconds)))
            except TimeoutError:
                account.timeouts += 1
                over = seconds >= room
                key, value = ("episode_timeout", limit) if over else ("turn_timeout", environment.turn_timeout)
                failure = Failure("timeout", f"took longer than {key}={value} s")
                last = over or attempt == environment.retries
            except ConfigError:  # a retry cannot help
                raise
            except Exception as error:  # whatever else an environment raises belongs to its episode
                failure, last = Failure("error", f"{type(error).__name__}: {error}"), attempt == environment.retries
            if last:
                break
            account.retries += 1
            pause = min(_FIRST_PAUSE * 2**attempt, max(0.0, left - (time.monotonic() - began)))
            warn(
                "environment_failed",
                "environment of %s: %s; next: attempt %d of %d",
                name,
                failure.words,
                attempt + 2,
                environment.retries + 1,
            )
            await asyncio.sleep(pause)
        return failure


async def _called(step: Step) -> object:
    """Await an `async` step here, run other steps in a thread. Their result may be awaitable."""
    result = step() if inspect.iscoroutinefunction(step) else await in_thread(step)
    return await result if isinstance(result, Awaitable) else result


def _checked(turn: object) -> Turn:
    if not isinstance(turn, Turn):
        raise TypeError(f"step gave {type(turn).__name__}, and not a Turn")
    if not math.isfinite(turn.reward):
        raise ValueError(f"gave the reward {turn.reward}, which is no finite number")
    if any(message.get("role") == "assistant" for message in turn.observations):
        raise ValueError("an observation has the role assistant, which is the model's own")
    return turn


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def check_environment_rows(
    environments: Mapping[str, EnvironmentNode], column: str, rows: Iterable[tuple[str, Mapping[str, Any]]]
) -> None:
    """Raise ConfigError for rows (with origin) whose `column` names no environment, and for environments
    without rows."""
    known, named = ", ".join(environments), dict[str, None]()
    for origin, row in rows:
        named[str(row.get(column))] = None
        if row.get(column) not in environments:
            raise ConfigError(
                f"{origin}: {column}={row.get(column)!r} must be one of: {known}",
                code="unknown_name",
                keys=("rollout.environments", "rollout.environment_column"),
                fix=None if column in row else "rollout.environment_column=<the column that names it>",
            )
    for name in environments:
        if named and name not in named:
            raise ConfigError(
                f"rollout.environments.{name} applies to no row: the column {column} contains {', '.join(named)}",
                code="no_effect",
                keys=(f"rollout.environments.{name}",),
                fix=f"~rollout.environments.{name}",
            )
