"""A run that stands still ends with a sentence: which rank, where it is, and what the others wait in.

Every rank has one thread besides, which looks whether its own has come further; it never waits for the store. Another
one (`StoreTalk`) tells the others through the store of the process group how far its rank is. A rank that is stopped,
that holds the interpreter in C, or whose host cannot be reached, tells nothing any more; one that sleeps or waits for a
disk tells that it is not in a collective, where all others are.
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
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.config.safe_files import open_own, replace
from automodel_cli.distributed import process_group
from automodel_cli.distributed.store_client import StoreTalk
from automodel_cli.launch import rank_process, safe_output

T = TypeVar("T")
FIRST_SECONDS = 1500.0
"""For the first step (compilation), validations, checkpoints: less than the 30 minutes of the collectives."""
_AUTO_SECONDS, _AUTO_STEPS = 300.0, 10.0
_MAX_BEAT, _SAMPLE = 5.0, 0.02
_ANSWER_SECONDS = 5.0
"""For the store to answer; on a network of a cluster it takes a millisecond."""
_EXPIRED, _SPEAKER = "hang/expired", "hang/speaker"
_TORCH = f"{os.sep}torch{os.sep}"
_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"
_STACKS_SIGNAL = signal.SIGUSR2


_UNHEARD = {"beats": -1, "step": 0, "where": "before its first step", "at": "?", "waits": False, "host": "?", "pid": 0}
_UNHEARD |= {"seconds": FIRST_SECONDS}


class Watchdog:
    """`tick` says that this rank has come further; where it does not for too long, the run ends with exit code 1.

    `timeout`: seconds between ticks after the first step; "auto": ten times the slowest step so far, 5 minutes at
    least; None: nothing is watched. Collective only in that every rank makes one.
    """

    def __init__(self, timeout: float | Literal["auto"] | None, logs: Path, how_to_go_on: Callable[[], str]):
        self._timeout = float(timeout) if isinstance(timeout, (int, float)) else timeout
        self._logs, self._how_to_go_on = logs, how_to_go_on
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident or 0
        self._step, self._where, self._since = 0, "", time.monotonic()
        self._long = 1  # phases that may take FIRST_SECONDS, one inside the other
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
        """Before the first step."""
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
        """Step `step` begins."""
        now = time.monotonic()
        if self._step:
            self._long = 0
            self._slowest = max(self._slowest, now - self._step_began)
        self._step, self._step_began = step, now
        self.tick("the rows of the step")

    def tick(self, where: str) -> None:
        """This rank has come as far as `where`."""
        self._where, self._since = where, time.monotonic()

    @contextmanager
    def long(self, what: str) -> Iterator[None]:
        """What happens in here may take as long as a first step."""
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
        """Of the time since the last call, what the main thread did not wait for others or for the device: by samples.

        A GPU that computes more slowly than the others is not seen: the host waits for it as for them.
        """
        now = time.monotonic()
        elapsed, samples, busy = now - self._asked, self._samples, self._busy
        self._asked, self._samples, self._busy = now, 0, 0
        return elapsed * busy / samples if samples else elapsed

    def host_of(self, rank: int) -> str:
        """As rank `rank` told it."""
        told = self._ask(lambda store: store.get(_key(rank)))
        return json.loads(told)["host"] if told is not None else socket.gethostname()

    def stop(self) -> None:
        """After the last step, or when the run ends otherwise."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
            faulthandler.unregister(_STACKS_SIGNAL)
            empty = not os.fstat(self._file.fileno()).st_size  # its folder may be gone
            self._file.close()
            if empty:
                Path(self._file.name).unlink(missing_ok=True)

    def limit(self) -> float:
        """Seconds that the present phase may stand still."""
        if self._timeout == "auto":
            seconds = max(_AUTO_SECONDS, _AUTO_STEPS * self._slowest)
        else:
            seconds = float(self._timeout or 0)
        return max(seconds, FIRST_SECONDS) if self._long else seconds

    def _watch(self) -> None:
        beat = _MAX_BEAT if not isinstance(self._timeout, float) else min(_MAX_BEAT, max(0.1, self._timeout / 10))
        due = time.monotonic() + beat
        while not self._done.wait(_SAMPLE):
            self._samples += 1
            self._busy += not _waits(sys._current_frames().get(self._main))
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

    def _state(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main)
        return {
            "rank": self._rank,
            "beats": self._beats,
            "step": self._step,
            "where": self._where,
            "seconds": time.monotonic() - self._since,
            "at": _place(frame),
            "waits": _waits(frame),
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "pid": os.getpid(),
        }

    def _expire(self, beat: float) -> NoReturn:
        """Stacks and collectives of this rank into files; one rank says what it means; all end."""
        self._ask(lambda store: store.set(_EXPIRED, "1"))
        faulthandler.dump_traceback(self._file, all_threads=True)
        recorded = process_group.recorded_collectives()
        if recorded is not None:
            replace(self._logs / f"rank-{self._rank}.collectives.json", recorded)
        before = self._states()
        until = time.monotonic() + 3 * beat + (0 if self._rank == 0 else 2.0)  # rank 0 has the terminal
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
            time.sleep(1.0)  # the speaker ends first
        safe_output.flush()
        rank_process.report_exit_code(1)
        os._exit(1)

    def _states(self) -> dict[int, dict[str, Any]]:
        """What every rank told last; this one alone where the store does not answer."""

        def of_all(store: dist.Store) -> dict[int, dict[str, Any]]:
            keys = {rank: _key(rank) for rank in range(self._world_size)}
            told = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
            return {rank: json.loads(told[rank]) if rank in told else _UNHEARD | {"rank": rank} for rank in keys}

        return self._ask(of_all) or {self._rank: self._state()}


def sentence(
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    recorded: bytes | None,
    logs: Path,
    *,
    reached: bool = True,
) -> str:
    """Which rank stands still, and what the others wait in. `before` and `after`: what the ranks told, some beats
    apart; this one alone in `after` where the store was not `reached`."""
    if not reached:
        (mine,) = after.values()
        return (
            f"the store of the ranks on {os.environ.get('MASTER_ADDR', 'the first host')} does not answer rank "
            f"{mine['rank']} on {mine['host']}: the process that holds it is stopped or has ended, or its host cannot "
            f"be reached from here; rank {mine['rank']} is in {mine['at']} (step {mine['step']})"
        )
    silent = [rank for rank in after if after[rank]["beats"] == before.get(rank, {"beats": -1})["beats"]]
    silent = silent if len(silent) < len(after) else []
    away = [rank for rank, state in after.items() if not state["waits"]]
    rank = min(silent or away or after, key=lambda r: (after[r]["step"], -after[r]["seconds"]))
    state, others = after[rank], [other for r, other in after.items() if r != rank]
    quiet = "tells nothing any more (stopped, in C code, or its host cannot be reached)"
    how = quiet if rank in silent else f"is in {state['at']}"
    text = (
        f"rank {rank} (process {state['pid']} on {state['host']}) stands still: {how}, last heard of in step "
        f"{state['step']}, {state['where']}, {max(s['seconds'] for s in after.values()):.0f} s ago"
    )
    waiting = [other for other in others if other["waits"]]
    if waiting:
        collective = last_collective(recorded) if recorded is not None else None
        known = f" ({collective})" if collective else ""
        who = "the other one waits" if len(others) == 1 else f"{len(waiting)} of the {len(others)} others wait"
        text += f"; {who} in {waiting[0]['at']}{known}"
    return f"{text}; stacks of the ranks: {logs}/rank-N.stacks"


def last_collective(recorded: bytes) -> str | None:
    """The newest entry of torch's flight recorder that has not ended: what, of which sizes, in which group."""
    entries = [entry for entry in json.loads(recorded).get("entries", []) if not entry.get("retired", False)]
    if not entries:
        return None
    entry = entries[-1]
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in entry.get("input_sizes", []))
    group = "/".join(name for name in entry.get("process_group", []) if name)
    return f"{entry.get('profiling_name', 'a collective')} of {sizes}, group {group}".replace(" of ,", ",")


def _ask_for_stacks(
    before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]], speaker: int
) -> None:
    """A rank of this host that tells nothing may hold the interpreter: faulthandler's handler needs none."""
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


def _waits(frame: FrameType | None) -> bool:
    """Whether the innermost Python frame is torch.distributed's, or the one place where a step waits for the device."""
    if frame is None:
        return False
    if _DISTRIBUTED in frame.f_code.co_filename:
        return True
    while frame.f_back is not None and _TORCH in frame.f_code.co_filename:  # an event's own Python
        frame = frame.f_back
    return frame.f_code.co_name == "wait_for_device"


def _place(frame: FrameType | None) -> str:
    """The innermost frame, and the first one outside of torch that called it."""
    if frame is None:
        return "no Python frame"
    inner = f"{frame.f_code.co_name} ({_short(frame)})"
    caller: FrameType | None = frame
    while caller is not None and _TORCH in caller.f_code.co_filename:
        caller = caller.f_back
    if caller is None or caller is frame:
        return inner
    return f"{inner}, called by {caller.f_code.co_name} ({_short(caller)})"


def _short(frame: FrameType) -> str:
    parts = Path(frame.f_code.co_filename).parts
    return f"{'/'.join(parts[-2:])}:{frame.f_lineno}"
