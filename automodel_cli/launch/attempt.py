"""One attempt of a run: its failed ranks, their exit codes and the messages about them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import RunError
from automodel_cli.launch import rank_process, signals
from automodel_cli.launch.kill_diagnosis import MemoryWatch

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILED, _OUT_OF_MEMORY = 1, 4


@dataclass(frozen=True)
class Attempt:
    """All ranks, from their start to their end.

    `failures` are torch's records of failed ranks in the order of their discovery. `first_seen` is the first failed
    rank that the relay saw.
    """

    status: Path
    failures: Mapping[int, ProcessFailure]
    first_seen: int | None
    memory: MemoryWatch

    def first(self) -> int:
        """Return the rank that failed first. Requires a failure."""
        return self.first_seen if self.first_seen is not None else _first_failure(self.status, self.exit_codes())

    def exit_codes(self) -> dict[int, int]:
        return {rank: failure.exitcode for rank, failure in self.failures.items()}

    def killed_process(self) -> int | None:
        """Return the process of the first failed rank if SIGKILL ended it."""
        failure = self.failures.get(self.first())
        if failure is None or failure.exitcode != -signal.SIGKILL or left_by(self.status, self.first()) is not None:
            return None
        return failure.pid

    def may_be_tried_again(self) -> bool:
        if not self.failures or rank_process.is_final(left_by(self.status, self.first())):
            return False
        pid = self.killed_process()
        return pid is None or not self.memory.why(pid).out_of_memory


def _first_failure(status: Path, exit_codes: Mapping[int, int]) -> int:
    """Return the failed rank (in the order of discovery) that is the cause, if none was seen to fail first.

    Ranks that elastic ended with a signal are victims. Of the others, a rank that died without a message comes before
    its peers, which then lose their connection. Otherwise the rank that wrote its exit code first is the cause.
    """
    ended = (-signal.SIGTERM, -signal.SIGKILL)
    suspects = [rank for rank, code in exit_codes.items() if code not in ended] or list(exit_codes)[:1]
    files = {rank: status / f"rank-{rank}.exit" for rank in suspects}
    return min(suspects, key=lambda rank: files[rank].stat().st_mtime_ns if files[rank].exists() else 0)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "killed?"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def left_by(status: Path, rank: int) -> int | None:
    path = status / f"rank-{rank}.exit"
    return int(path.read_text()) if path.exists() else None


def report_restart(attempt: Attempt, which: str, run_folder: Path | None) -> None:
    """Print why the ranks restart, and from which checkpoint."""
    pid = attempt.killed_process()
    if pid is not None:
        print(f"\nrank {attempt.first()} was killed: process {pid} {attempt.memory.why(pid).by}", file=sys.stderr)
    else:
        report_failure(attempt)
    begin = signals.begins_at(run_folder) if run_folder is not None else "starts over: no step was trained yet"
    print(f"restart {which} (train.max_restarts): {begin}", file=sys.stderr)


def report_killed(attempt: Attempt, pid: int) -> int:
    """Print which rank was killed, by whom and how to resume. Return the exit code."""
    rank, evidence = attempt.first(), attempt.memory.why(pid)
    less = "model.dtype=bfloat16, a smaller train.microbatch_size or data.seq_len, or more ranks; then "
    error = RunError(
        f"rank {rank} (process {pid}) was killed by SIGKILL, {evidence.by}",
        code="out_of_memory" if evidence.out_of_memory else "rank_failure",
        origin=evidence.source,
        fix=(less if evidence.out_of_memory else "") + signals.resume_hint(rank_process.run_folder_in(attempt.status)),
    )
    print(error.full_text, file=sys.stderr)
    return _OUT_OF_MEMORY if evidence.out_of_memory else FAILED


def report_failure(attempt: Attempt, num_lines: int = 20) -> None:
    """Print which rank failed and the end of its log. Rank 0 has already written to the terminal."""
    failed, left = attempt.first(), left_by(attempt.status, attempt.first())
    pointer = attempt.status / f"rank-{failed}.log"
    how = "failed" if left else f"ended without an error message ({_ending(attempt.exit_codes().get(failed))})"
    if not pointer.exists():
        if left is None:
            print(f"rank {failed} {how}", file=sys.stderr)
        return
    start, _, path = pointer.read_text().partition(" ")
    print(f"\nrank {failed} {how}; the end of {path}:", file=sys.stderr)
    with Path(path).open(errors="replace") as stream:
        stream.seek(int(start))
        for line in stream.read().splitlines()[-num_lines:]:
            print(f"  {line}", file=sys.stderr)
