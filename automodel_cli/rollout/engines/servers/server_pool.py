"""Several generation servers behind one engine: who gets which request, and what happens when one is gone.

Every server holds the whole model. A server that is gone is left out and its requests are sent to the others; it takes
requests again once it answers and has the current weights, so every sample is one of the policy of its step.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.warn import warn
from automodel_cli.rollout.engines.base import resolve_seeds
from automodel_cli.rollout.engines.live_update import WeightUpdateMixin
from automodel_cli.rollout.engines.servers.http_engine import HTTPEngine
from automodel_cli.rollout.http import ServerError
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream
from automodel_cli.rollout.weight_sync.transports import FileTransfer, SharedTransfer

E = TypeVar("E", bound=HTTPEngine)

_HEALTH_TIMEOUT = 5.0  # seconds


@dataclass(eq=False)
class _Member(Generic[E]):
    """One server: its requests that are open, and why it is left out (None: it is not)."""

    engine: E
    open: int = 0
    gone: str | None = None

    @property
    def url(self) -> str:
        return self.engine.server.url

    def is_healthy(self) -> bool:
        """Whether it answers `/health`; a server that does not know the path answers too."""
        try:
            replace(self.engine.server, timeout=_HEALTH_TIMEOUT, retries=0).get("/health")
        except ServerError as error:
            return error.status == 404
        return True


@dataclass
class _Call:
    """One call of `generate`: requests without an answer, and the server that had a prompt last."""

    unanswered: int
    homes: dict[tuple[int, ...], _Member[Any]] = field(default_factory=dict)


class ServerPool(Generic[E]):
    """An engine that spreads requests over `engines`, at most `concurrency` open at each.

    A request goes to the live server with the fewest open requests; further samples of its prompt to the same one,
    whose prefix cache holds it, until that has its share of all requests without an answer. A server that is left out
    is asked for its health every `health_every` seconds. When one is left out while others are busy, its requests are
    sent to those at once, beyond `concurrency`.

    Raises ConfigError where the servers do not all give the same (token ids, log-probs).
    """

    def __init__(self, engines: Sequence[E], *, concurrency: int, health_every: float = 10.0):
        self._members = [_Member(engine) for engine in engines]
        self._concurrency, self._every = concurrency, health_every
        self._changed = threading.Condition()
        self._looked = time.monotonic()
        at_once = concurrency * len(engines)
        self.capabilities, self.weight_version = replace(engines[0].capabilities, at_once=at_once), 0
        for engine in engines[1:]:
            if engine.capabilities != engines[0].capabilities:
                raise ConfigError(
                    f"{engines[0].server.url} and {engine.server.url} have different capabilities: "
                    f"{engines[0].capabilities} and {engine.capabilities}",
                    code="server_mismatch",
                    keys=("rollout.engine.url",),
                    fix="start all servers with the same command",
                )

    @property
    def metrics(self) -> dict[str, float]:
        """How many servers take requests."""
        return {"live_servers": len(self._live())}

    def idle_fraction(self) -> float:
        """See `OpenRequests`; the mean over the servers that take requests."""
        share_of = {member: member.engine.idle_fraction() for member in self._members}
        return statistics.fmean(share_of[member] for member in self._live() or self._members)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `Engine.generate`. Answers of a server that turns out to have other weights than it was given, or that
        cannot be asked any more, are dropped and drawn by the others.

        Raises RunError when no server is left, and for what a server refuses.
        """
        for member in self._members:
            member.engine.check_params(params)
        seeds = resolve_seeds(prompts, params, seeds)
        found: dict[int, Completion] = {}
        if time.monotonic() - self._looked >= self._every:
            self._look()
        with self._watched():
            while len(found) < len(prompts):
                missing = [i for i in range(len(prompts)) if i not in found]
                losses = {member: member.engine.num_losses for member in self._members}
                drawn = self._drawn([(tuple(prompts[i]), seeds[i]) for i in missing], params)
                sure = {member for member in {member for member, _ in drawn} if self._is_sure(member, losses[member])}
                found |= {i: answer for i, (member, answer) in zip(missing, drawn, strict=True) if member in sure}
        return [found[i] for i in range(len(prompts))]

    def update_weights(self, stream: WeightStream) -> None:
        """Refused, as one server refuses it."""
        self._members[0].engine.update_weights(stream)

    # -- requests

    def _drawn(
        self, requests: Sequence[tuple[tuple[int, ...], int]], params: SamplingParams
    ) -> list[tuple[_Member[E], Completion]]:
        """An answer to each (prompt, seed), with the server that gave it."""
        call = _Call(len(requests))
        futures: list[Future[tuple[_Member[E], Completion]]] = []
        with ThreadPoolExecutor(min(len(requests), self._concurrency * len(self._members))) as threads:
            try:
                for prompt, seed in requests:
                    member = self._taken(prompt, call)
                    futures.append(threads.submit(self._answered, member, prompt, params, seed, call))
                for ended in wait(futures, return_when=FIRST_EXCEPTION).done:
                    ended.result()  # what one raised is not waited for until all have ended
                return [future.result() for future in futures]
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _answered(
        self, member: _Member[E], prompt: tuple[int, ...], params: SamplingParams, seed: int, call: _Call
    ) -> tuple[_Member[E], Completion]:
        """By `member`, or by others where it is gone: as often as there are servers, so that a request which ends its
        server cannot go round for ever."""
        for _ in self._members:
            try:
                completion = member.engine.complete(prompt, params, seed)
            except ServerError as error:
                self._release(member)
                if not error.is_busy_or_gone:
                    raise
                self._leave_out(member, error.message)
                member = self._taken(prompt, call, beyond=True)
            except BaseException:
                self._release(member)
                raise
            else:
                with self._changed:
                    call.unanswered -= 1
                self._release(member)
                return member, completion
        self._release(member)
        raise RunError(
            f"{len(self._members)} generation servers stopped responding, one after another, to the same request",
            code="server_unreachable",
            keys=("rollout.engine.url",),
            fix="read the logs of the servers; then automodel resume RUN",
        )

    def _taken(self, prompt: tuple[int, ...], call: _Call, *, beyond: bool = False) -> _Member[E]:
        """The server for a sample of `prompt`, counted as open there. Waits for room unless `beyond`."""
        with self._changed:
            while True:
                live = self._live()
                if not live:
                    raise self._all_gone()
                share = min(self._concurrency, math.ceil(call.unanswered / len(live)))
                member = call.homes.get(prompt)
                if member is None or member.gone is not None or member.open >= share:
                    member = min(live, key=lambda member: member.open)
                if beyond or member.open < self._concurrency:
                    break
                self._changed.wait()
            member.open += 1
            call.homes[prompt] = member
            return member

    def _release(self, member: _Member[E]) -> None:
        with self._changed:
            member.open -= 1
            self._changed.notify_all()

    # -- who is there

    def _live(self) -> list[_Member[E]]:
        return [member for member in self._members if member.gone is None]

    def _is_sure(self, member: _Member[E], losses: int) -> bool:
        """Whether its answers are of the weights that it was given, since it had lost them `losses` times. One of which
        that is not known is left out."""
        try:
            if member.engine.has_given_weights() and member.engine.num_losses == losses:
                return True
            reason = "it no longer has the weights that this run gave it (it was started anew, or another run uses it)"
        except ServerError as error:
            reason = error.message
        self._leave_out(member, reason)
        return False

    def _leave_out(self, member: _Member[E], reason: str) -> None:
        with self._changed:
            if member.gone is not None:
                return
            member.gone = reason
            left = len(self._live())
            self._changed.notify_all()
        warn(
            "server_unreachable",
            "generation server %s is excluded; %d of %d remain: %s",
            member.url,
            left,
            self._size,
            reason,
        )

    def _take_back(self, member: _Member[E]) -> None:
        with self._changed:
            if member.gone is None or member.engine.weight_version != self.weight_version:
                return
            member.gone = None
            left = len(self._live())
            self._changed.notify_all()
        warn(
            "server_restored",
            "generation server %s is used again; %d of %d are available",
            member.url,
            left,
            self._size,
        )

    @property
    def _size(self) -> int:
        return len(self._members)

    def _look(self) -> None:
        """Take back whoever answers again and has the current weights."""
        self._looked = time.monotonic()
        for member in self._members:
            if member.gone is None or not member.is_healthy():
                continue
            try:
                if member.engine.has_given_weights():
                    self._take_back(member)
            except ServerError:
                pass  # gone again

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, servers that are left out are asked for their health from time to time."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(self._every):
                self._look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _all_gone(self) -> RunError:
        reasons = "".join(f"\n  {member.url}: {member.gone}" for member in self._members)
        return RunError(
            f"none of the {self._size} generation servers responds:{reasons}",
            code="server_unreachable",
            keys=("rollout.engine.url",),
            fix="start the servers again; then automodel resume RUN",
        )


class LivePool(ServerPool[WeightUpdateMixin]):
    """Servers that get new weights by one transfer: all read the files that are written once, or are in one group."""

    def __init__(
        self,
        engines: Sequence[WeightUpdateMixin],
        transfer: FileTransfer | SharedTransfer,
        *,
        concurrency: int,
        health_every: float = 10.0,
    ):
        super().__init__(engines, concurrency=concurrency, health_every=health_every)
        self._transfer = transfer

    def update_weights(self, stream: WeightStream) -> None:
        """Every server that answers gets the new weights, also one that was left out, which is then taken back.

        Raises RunError when a server refuses them, and when none is left. A server that dies while weights are
        broadcast ends the run: those of the others are then a mixture.
        """
        if isinstance(self._transfer, FileTransfer):
            with self._transfer.written(iter(stream)) as folder:
                asked = self._asked_for_update(sure=False)
                with ThreadPoolExecutor(max(1, len(asked))) as threads:
                    list(threads.map(lambda member: self._given(member, folder), asked))
        elif asked := self._asked_for_update(sure=True):
            paused = [partial(member.engine.paused, self.weight_version) for member in asked]
            self._transfer.send_to([member.engine for member in asked], iter(stream), paused)
            for member in asked:
                member.engine.weight_version = self.weight_version
                self._take_back(member)
        for member in self._live():
            if member.engine.weight_version != self.weight_version:
                self._leave_out(member, "it was taken back while the others were given new weights")
        if not self._live():
            raise self._all_gone()

    def _asked_for_update(self, *, sure: bool) -> list[_Member[WeightUpdateMixin]]:
        """Who gets the next version, which is counted here; with `sure` only who answers now."""
        asked = []
        for member in self._members:
            if (member.gone is None and not sure) or member.is_healthy():
                asked.append(member)
            else:
                self._leave_out(member, "it does not answer /health")
        with self._changed:
            self.weight_version += 1  # from here on nobody is taken back without these
        return asked

    def _given(self, member: _Member[WeightUpdateMixin], folder: Path) -> None:
        try:
            member.engine.read_weights(folder, self.weight_version)
        except ServerError as error:
            if member.gone is None and error.status is not None and member.is_healthy():
                raise  # it is there and refuses the weights
            self._leave_out(member, error.message)
        else:
            self._take_back(member)
