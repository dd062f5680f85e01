"""A rank's trace in a process forked from the warm server of ranks: `trace_rank` without its imports, which take
longer than the trace of a tiny model. So is what a command traces (tests/warm.py); `measure` starts new processes."""

from __future__ import annotations

from typing import Any

from automodel_cli.dryrun.rank import trace
from automodel_cli.dryrun.request import RankResult, Request
from automodel_cli.dryrun.worker import load
from tests.dist.harness import launch


def trace_in_fork(request: Request) -> RankResult:
    return RankResult.from_dict(launch(_trace, 1, request.to_json(), timeout=400, process_group=False))


def _trace(rank: int, world: int, given: str) -> dict[str, Any]:
    request = Request.from_json(given)
    return trace(load(request), request).to_dict()
