"""A rank's trace in a process forked from the warm server of ranks: `trace_rank` without its imports, which take
longer than the trace of a tiny model. So is what a command traces (tests/warm.py); `measure` starts new processes."""

from __future__ import annotations

from typing import Any

from automodel_cli.dryrun.rank_state import RankTrace
from automodel_cli.dryrun.trace_errors import described
from automodel_cli.dryrun.trace_rank import trace
from automodel_cli.dryrun.types import RankResult, TraceRequest
from automodel_cli.dryrun.worker import load
from tests.dist.harness import launch


def trace_in_fork(request: TraceRequest) -> RankResult:
    return RankResult.from_dict(launch(_trace, 1, request.to_json(), timeout=400, process_group=False))


def _trace(rank: int, world: int, given: str) -> dict[str, Any]:
    request = TraceRequest.from_json(given)
    return trace(load(request), request).to_dict()


def failed_in_fork(request: TraceRequest) -> dict[str, Any]:
    """What the worker answers for a trace that raises."""
    return launch(_failed, 1, request.to_json(), timeout=400, process_group=False)


def _failed(rank: int, world: int, given: str) -> dict[str, Any]:
    request = TraceRequest.from_json(given)
    try:
        trace(load(request), request)
    except Exception as error:
        return described(error)
    raise AssertionError("the trace went through")


def ends_of_steps(request: TraceRequest) -> list[tuple[float, float]]:
    """For each step: when the host goes on, and when the device is done."""
    return launch(_ends, 1, request.to_json(), timeout=400, process_group=False)


def _ends(rank: int, world: int, given: str) -> list[tuple[float, float]]:
    request, found = TraceRequest.from_json(given), list[tuple[float, float]]()
    step = RankTrace.step

    def watched(self: RankTrace, *args: Any) -> float:
        seconds = step(self, *args)
        found.append((self.clock.host, self.clock.now()))
        return seconds

    RankTrace.step = watched  # type: ignore[method-assign]
    trace(load(request), request)
    return found
