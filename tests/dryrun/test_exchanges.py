"""What an exchange of tokens costs in model time: nothing where products run meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_cli.dryrun.fake_device.collectives import Collectives
from automodel_cli.dryrun.trace_rank import trace
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.dryrun.worker import load
from tests.dist.harness import launch
from tests.dryrun.test_recipes import _ONCE_A_STEP, _fewer_layers


def _times(rank: int, world: int, given: str, wait_at_once: bool) -> tuple[float, float]:
    """Model seconds of one more microbatch, which reduces no gradients, and of the exchanges in it."""
    if wait_at_once:
        timed = Collectives.exchanged

        def exchanged(self: Collectives, exchange: Any) -> Any:
            start = timed(self, exchange)

            def waited(*args: Any) -> Any:
                arriving = start(*args)
                arriving()
                return arriving

            return waited

        Collectives.exchanged = exchanged  # type: ignore[method-assign]
    request = TraceRequest.from_json(given)
    found = trace(load(request), request)
    in_exchanges = sum(row["seconds"] for row in found.collectives if "alltoall" in row["operator"])
    return sum(found.microbatch_seconds.values()), in_exchanges / 2


@pytest.mark.slow
def test_gradients_of_tokens_go_back_while_those_of_weights_are_made() -> None:
    """One of four exchanges that take equally long, in a layer without shared experts that nothing recomputes."""
    overrides = (*_fewer_layers("qwen3_moe_30b_ep8", 2), *_ONCE_A_STEP)
    request = TraceRequest("qwen3_moe_30b_ep8", overrides, 8, 0, microbatches=2).to_json()
    options: dict[str, Any] = {"timeout": 400, "process_group": False}
    beside, in_exchanges = launch(_times, 1, request, False, **options)
    one_by_one, _ = launch(_times, 1, request, True, **options)
    assert one_by_one - beside == pytest.approx(in_exchanges / 4, rel=0.15)
