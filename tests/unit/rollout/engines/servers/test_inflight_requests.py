"""The share of the time in which a server has none of our requests: servers on this machine that take their time."""

from __future__ import annotations

import time

import pytest

from automodel_cli.config.errors import RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.colocated import SharedGPUs
from automodel_cli.rollout.types import SamplingParams
from tests.errors import raises
from tests.unit.rollout.engines.servers.test_http_engine_servers import Refused, VLLMDouble, make_oracle
from tests.unit.rollout.engines.servers.test_server_pool import SEEN, dropped, pool_of

ONE_TOKEN = SamplingParams(1, temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


@pytest.fixture(scope="module")
def servers(tokenizer):
    started = [VLLMDouble(make_oracle(tokenizer)) for _ in range(2)]
    yield started
    for double in started:
        double.server.shutdown()
        double.server.server_close()


@pytest.fixture
def doubles(servers):
    """The first answers a prompt [n, ...] after n hundredths of a second, the second after thrice that."""
    for times, double in zip((1, 3), servers, strict=True):
        double.hooks = {SEEN: lambda body, times=times: time.sleep(body["prompt"][0] / 100 * times)}
    return servers


@pytest.fixture
def engines(doubles, tokenizer):
    pool = pool_of(doubles, tokenizer)
    return pool, [member.engine for member in pool._members]


def watched(engine) -> list[tuple[float, float]]:
    """When each request of the engine begins and ends, from now on."""
    spans, own = [], engine._completed

    def completed(*request):
        began = time.monotonic()
        try:
            return own(*request)
        finally:
            spans.append((began, time.monotonic()))

    engine._completed = completed
    return spans


def covered(spans, since: float) -> float:
    """Seconds since then in at least one of the spans."""
    found, until = 0.0, since
    for began, ended in sorted(spans):
        found += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return found


def test_requests_that_are_open_together_count_once(engines):
    _, (engine, _) = engines
    spans = watched(engine)
    engine.idle_fraction()
    since = time.monotonic()
    time.sleep(0.1)
    engine.generate([[10], [30]], ONE_TOKEN)  # 0.1 s of 0.3
    time.sleep(0.1)
    share, total = engine.idle_fraction(), time.monotonic() - since
    assert share == pytest.approx(1 - covered(spans, since) / total, abs=0.01)
    assert sum(ended - began for began, ended in spans) > covered(spans, since) + 0.09
    assert share >= 0.2 / total - 0.01
    time.sleep(0.01)
    assert engine.idle_fraction() == 1


def test_one_that_is_open_when_it_is_asked_counts_on_either_side(engines):
    _, (engine, _) = engines
    with engine._open.one_more():
        engine.idle_fraction()
        time.sleep(0.05)
        assert engine.idle_fraction() == 0
        since = time.monotonic()
        time.sleep(0.05)
    until = time.monotonic()
    time.sleep(0.05)
    share, total = engine.idle_fraction(), time.monotonic() - since
    assert share == pytest.approx(1 - (until - since) / total, abs=0.01)


def test_of_a_request_that_fails_nothing_stays_open(engines, doubles):
    _, (engine, _) = engines

    def refuse(body):
        raise Refused(400, "no")

    doubles[0].hooks[SEEN] = refuse
    with raises(RunError, "server_rejected", values=(400,)):
        engine.generate([[7]], ONE_TOKEN)
    engine.idle_fraction()
    time.sleep(0.01)
    assert engine.idle_fraction() == 1


def test_of_several_servers_it_is_the_mean_over_those_that_take_requests(engines, doubles):
    pool, members = engines
    spans = [watched(engine) for engine in members]

    def shares(since: float, numbers) -> float:
        total = time.monotonic() - since
        return sum(1 - covered(spans[number], since) / total for number in numbers) / len(numbers)

    for told in (pool, SharedGPUs(pool, members)):
        pool.idle_fraction()
        since = time.monotonic()
        pool.generate([[10, 1], [10, 2]], ONE_TOKEN)  # one each: 0.1 and 0.3 s
        assert told.idle_fraction() == pytest.approx(shares(since, (0, 1)), abs=0.01)
        assert all(covered(of_server, since) > 0.1 for of_server in spans)
    doubles[1].hooks = dict.fromkeys((SEEN, "/health", "/weight_info"), dropped)
    pool.generate([[10, 1], [10, 2]], ONE_TOKEN)
    assert pool.metrics == {"live_servers": 1}
    pool.idle_fraction()
    since = time.monotonic()
    pool.generate([[10]], ONE_TOKEN)
    time.sleep(0.1)
    assert pool.idle_fraction() == pytest.approx(shares(since, (0,)), abs=0.01)
