"""End a hanging run with a message: the rank that hangs, its position, and the collective that the others wait in.

Every rank has one thread that checks the rank's progress and never waits for the store. A second thread (`StoreTalk`)
publishes the progress through the store of the process group. A rank that is stopped, that holds the interpreter in C,
or whose host is unreachable publishes nothing. A rank that sleeps or waits for a disk reports that it is not in a
collective, while all others are.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.config.security.safe_files import open_own, replace
from automodel_cli.distributed import process_group
from automodel_cli.distributed.store_client import StoreTalk
from automodel_cli.launch import rank_process, safe_output
from automodel_cli.training.monitors.stall_report import RankState, frame_text, sentence, waits

T = TypeVar("T")
FIRST_SECONDS = 1500.0
"""Limit of the first step (compilation), validations and checkpoints: below the 30 minutes of collectives."""
_AUTO_SECONDS, _AUTO_STEPS = 300.0, 10.0
_MAX_BEAT, _SAMPLE = 5.0, 0.02
_ANSWER_SECONDS = 5.0
"""Response time of the store. On a cluster network it takes a millisecond."""
_EXPIRED, _SPEAKER = "hang/expired", "hang/speaker"
_STACKS_SIGNAL = signal.SIGUSR2


class Watchdog:
    """Ends the run with exit code 1 if this rank makes no progress (`tick`) for too long.

    `timeout`: seconds between ticks after the first step. "auto": ten times the slowest step so far, at least 5
    minutes. None: no limit. Every rank must construct one.
    """

    def __init__(self, timeout: float | Literal["auto"] | None, logs: Path, how_to_go_on: Callable[[], str]):
        self._timeout = timeout
        self._logs, self._how_to_go_on = logs, how_to_go_on
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident or 0
        self._step, self._where, self._since = 0, "", time.monotonic()
        self._long = 1  # nesting depth of phases that may take FIRST_SECONDS
        self._slowest, self._step_began = 0.0, time.monotonic()
        self._beats = 0
        self._samples, self._busy, self._asked = 0, 0, time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._talk: StoreTalk | None = None
        self._others_expired = False

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start before the first step."""
        if self._timeout is None:
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        self._file = open_own(self._logs / f"rank-{self._rank}.stacks", "w")  # for the signal handler too
        faulthandler.register(_STACKS_SIGNAL, file=self._file, all_threads=True)
        store = process_group.own_store()
        self._talk = None if store is None else StoreTalk(store)
        self._since = self._step_began = time.monotonic()
        self._tell()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def step(self, step: int) -> None:
        """Start step `step`."""
        now = time.monotonic()
        if self._step:
            self._long = 0
            self._slowest = max(self._slowest, now - self._step_began)
        self._step, self._step_began = step, now
        self.tick("the rows of the step")

    def tick(self, where: str) -> None:
        """Record that this rank has reached `where`."""
        self._where, self._since = where, time.monotonic()

    @contextmanager
    def long(self, what: str) -> Iterator[None]:
        """Context of a phase that may take as long as a first step."""
        self._long += 1
        self.tick(what)
        begin = time.monotonic()
        try:
            yield
        finally:
            self._long -= 1
            self._step_began += time.monotonic() - begin
            self.tick(f"after {what}")

    def busy_seconds(self) -> float:
        """Return the seconds since the last call in which the main thread did not wait for other ranks or the device.

        Estimated by sampling. A slow GPU is not detected, because the host waits for it as for other ranks.
        """
        now = time.monotonic()
        elapsed, samples, busy = now - self._asked, self._samples, self._busy
        self._asked, self._samples, self._busy = now, 0, 0
        return elapsed * busy / samples if samples else elapsed

    def host_of(self, rank: int) -> str:
        """Return the host of rank `rank`, as published by it."""
        value = self._ask(lambda store: store.get(_key(rank)))
        return json.loads(value)["host"] if value is not None else socket.gethostname()

    def stop(self) -> None:
        """Stop after the last step, or if the run ends otherwise."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
            faulthandler.unregister(_STACKS_SIGNAL)
            empty = not os.fstat(self._file.fileno()).st_size  # its folder may be deleted
            self._file.close()
            if empty:
                Path(self._file.name).unlink(missing_ok=True)

    def limit(self) -> float:
        """Seconds without progress that the present phase allows."""
        if self._timeout == "auto":
            seconds = max(_AUTO_SECONDS, _AUTO_STEPS * self._slowest)
        else:
            seconds = float(self._timeout or 0)
        return max(seconds, FIRST_SECONDS) if self._long else seconds

    def _watch(self) -> None:
        beat = _MAX_BEAT
        if self._timeout is not None and self._timeout != "auto":
            beat = min(_MAX_BEAT, max(0.1, self._timeout / 10))
        due = time.monotonic() + beat
        while not self._done.wait(_SAMPLE):
            self._samples += 1
            self._busy += not waits(sys._current_frames().get(self._main))
            if time.monotonic() < due:
                continue
            due = time.monotonic() + beat
            self._tell()
            if time.monotonic() - self._since > self.limit() or self._others_expired:
                self._expire(beat)

    def _tell(self) -> None:
        if self._talk is None:
            return
        self._beats += 1
        state = json.dumps(self._state())

        def beat(store: dist.Store) -> None:
            store.set(_key(self._rank), state)
            self._others_expired = store.check([_EXPIRED])

        self._talk.post(beat)

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        return None if self._talk is None else self._talk.ask(question, _ANSWER_SECONDS)

    def _state(self) -> RankState:
        frame = sys._current_frames().get(self._main)
        return {
            "rank": self._rank,
            "beats": self._beats,
            "step": self._step,
            "where": self._where,
            "seconds": time.monotonic() - self._since,
            "at": frame_text(frame),
            "waits": waits(frame),
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "pid": os.getpid(),
        }

    def _expire(self, beat: float) -> NoReturn:
        """Write stacks and collectives of this rank to files, print the diagnosis on one rank, and end all ranks."""
        self._ask(lambda store: store.set(_EXPIRED, "1"))
        faulthandler.dump_traceback(self._file, all_threads=True)
        recorded = process_group.recorded_collectives()
        if recorded is not None:
            replace(self._logs / f"rank-{self._rank}.collectives.json", recorded)
        before = self._states()
        until = time.monotonic() + 3 * beat + (0 if self._rank == 0 else 2.0)  # rank 0 prints to the terminal
        while time.monotonic() < until:
            time.sleep(beat)
            self._tell()
        if self._ask(lambda store: store.add(_SPEAKER, 1)) in (None, 1):
            after = self._states()
            _ask_for_stacks(before, after, self._rank)
            reached = len(after) == self._world_size
            text = sentence(before, after, recorded, self._logs, reached=reached)
            error = RunError(text, code="timeout", fix=self._how_to_go_on())
            safe_output.urgent(f"\n{error.full_text}\n")
        else:
            time.sleep(1.0)  # the rank that prints ends first
        safe_output.flush()
        rank_process.report_exit_code(1)
        os._exit(1)

    def _states(self) -> dict[int, RankState]:
        """Return the last published state of every rank; only that of this rank if the store does not respond."""

        def of_all(store: dist.Store) -> dict[int, RankState]:
            keys = {rank: _key(rank) for rank in range(self._world_size)}
            published = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
            return {rank: json.loads(published[rank]) if rank in published else _unheard(rank) for rank in keys}

        return self._ask(of_all) or {self._rank: self._state()}


def _unheard(rank: int) -> RankState:
    """Return the state of a rank that has published none."""
    return {
        "rank": rank,
        "beats": -1,
        "step": 0,
        "where": "before its first step",
        "seconds": FIRST_SECONDS,
        "at": "?",
        "waits": False,
        "host": "?",
        "pid": 0,
    }


def _ask_for_stacks(before: Mapping[int, RankState], after: Mapping[int, RankState], speaker: int) -> None:
    """Print the stacks of a silent rank on this host. It may hold the interpreter, which faulthandler does not need."""
    here = after[speaker]["host"]
    for rank, state in after.items():
        if (
            rank != speaker
            and state["pid"]
            and state["host"] == here
            and state["beats"] == before.get(rank, state)["beats"]
        ):
            try:
                os.kill(state["pid"], _STACKS_SIGNAL)
            except (ProcessLookupError, PermissionError):
                continue


def _key(rank: int) -> str:
    return f"hang/rank-{rank}"
