"""Several servers behind one engine: real ones on this machine (the double of vLLM's endpoints, with a real model).

What they answer together is compared with one model in this process; who got what, with what each server saw.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.config import ServerConfig, VLLMConfig
from automodel_cli.rollout.engines.servers.live_pool import LivePool
from automodel_cli.rollout.engines.servers.openai import OpenAIEngine
from automodel_cli.rollout.engines.servers.server_pool import ServerPool
from automodel_cli.rollout.engines.servers.vllm import VLLMEngine
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.rollout.weight_sync.transports import FileTransfer
from tests import tiny
from tests.errors import raises
from tests.unit.rollout.engines.servers.test_http_engine_servers import Refused, VLLMDouble, build_model, make_oracle

PROMPTS = [[7, 8, 9], [30, 31], [40, 41, 42, 43], [50]]
PARAMS = SamplingParams(max_new_tokens=6)
SEEN = "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


@pytest.fixture
def doubles(tokenizer):
    started = [VLLMDouble(make_oracle(tokenizer)) for _ in range(2)]
    yield started
    for double in started:
        double.server.shutdown()
        double.server.server_close()


def pool_of(doubles, tokenizer, folder=Path("unused"), *, concurrency=64, retries=0, health_every=60.0) -> LivePool:
    files, stops = FileTransfer(folder), [tokenizer.eos_token_id]
    servers = [Server(double.url, timeout=20, retries=retries, backoff=0.01) for double in doubles]
    engines = [VLLMEngine(server, tokenizer, files, stop_token_ids=stops) for server in servers]
    for double in doubles:
        double.calls.clear()
    return LivePool(engines, files, concurrency=concurrency, health_every=health_every)


def seen(double) -> Counter:
    """The prompts of which the server was asked a completion, and how often."""
    return Counter(tuple(body["prompt"]) for path, body in double.calls if path == SEEN)


def asked(num_samples: int, prompts=PROMPTS):
    every = [prompt for prompt in prompts for _ in range(num_samples)]
    return every, list(range(len(every)))


def assert_same(found, want) -> None:
    assert [c.tokens for c in found] == [c.tokens for c in want]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in want]
    for ours, theirs in zip(found, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def kill(double) -> None:
    """No more connections; those that are open end without an answer."""
    double.hooks = dict.fromkeys((SEEN, "/health", "/weight_info", "/pause?mode=keep"), dropped)
    double.server.shutdown()
    double.server.socket.close()


def dropped(body):
    raise ConnectionResetError


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """The double's threads print what they raise."""
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: None)


@pytest.fixture
def trained(tokenizer):
    model = build_model(tokenizer)
    tiny.perturb(model, 5)
    return model


def named(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def oracle_of(model, tokenizer):
    return HFEngine(model, stop_token_ids=[tokenizer.eos_token_id], pad_token_id=0)


def all_wait_for_all(doubles, number: int) -> None:
    """No server answers before `number` requests are open: so none gets room by being quick."""
    barrier = threading.Barrier(number)

    def together(body):
        barrier.wait(20)

    for double in doubles:
        double.hooks[SEEN] = together


def test_samples_of_a_prompt_go_to_one_server_and_prompts_to_the_one_with_fewer(doubles, tokenizer):
    pool = pool_of(doubles, tokenizer)
    prompts, seeds = asked(3)
    all_wait_for_all(doubles, len(prompts))
    found = pool.generate(prompts, PARAMS, seeds)
    assert_same(found, make_oracle(tokenizer).generate(prompts, PARAMS, seeds))
    assert seen(doubles[0]) == {(7, 8, 9): 3, (40, 41, 42, 43): 3}
    assert seen(doubles[1]) == {(30, 31): 3, (50,): 3}
    assert pool.metrics == {"live_servers": 2}


def test_a_server_with_its_share_of_a_prompt_leaves_the_rest_to_others(doubles, tokenizer):
    pool = pool_of(doubles, tokenizer)
    prompts, seeds = asked(8, PROMPTS[:1])
    all_wait_for_all(doubles, 8)
    pool.generate(prompts, PARAMS, seeds)
    assert [seen(double).total() for double in doubles] == [4, 4]


def test_a_slow_server_gets_less(doubles, tokenizer):
    pool, others_done = pool_of(doubles, tokenizer, concurrency=2), threading.Event()
    slow, quick = doubles
    prompts, seeds = asked(1, [[i, i + 1] for i in range(7, 19)])

    def until_the_others_are_done(body):
        others_done.wait(20)

    def count(body):
        if seen(quick).total() == len(prompts) - 2:
            others_done.set()

    slow.hooks[SEEN], quick.hooks[SEEN] = until_the_others_are_done, count
    found = pool.generate(prompts, PARAMS, seeds)
    assert_same(found, make_oracle(tokenizer).generate(prompts, PARAMS, seeds))
    assert [seen(slow).total(), seen(quick).total()] == [2, 10]


def test_a_server_killed_while_it_generates_is_left_out_until_it_has_the_weights(
    doubles, tokenizer, tmp_path, trained, caplog
):
    pool = pool_of(doubles, tokenizer, tmp_path, concurrency=2, retries=1, health_every=0.05)
    pool.update_weights([named(trained)])
    prompts, seeds = asked(4)
    want = oracle_of(trained, tokenizer).generate(prompts, PARAMS, seeds)
    first, second = doubles

    def dies_at_its_third(body):
        if seen(second).total() >= 3:
            kill(second)
            raise ConnectionResetError

    second.hooks[SEEN] = dies_at_its_third
    with caplog.at_level(logging.WARNING):
        assert_same(pool.generate(prompts, PARAMS, seeds), want)
    assert pool.metrics == {"live_servers": 1}
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"[server_unreachable] generation server {second.url} ")
    assert f"1 of 2 remain: POST {second.url}{SEEN} failed" in said
    assert seen(first).keys() == set(map(tuple, prompts))  # also those that the other had

    again = VLLMDouble(make_oracle(tokenizer), second.server.server_address[1])
    doubles.append(again)

    def slowly(body):
        time.sleep(0.1)

    first.hooks[SEEN] = slowly
    assert_same(pool.generate(prompts, PARAMS, seeds), want)  # asked for its health many times meanwhile
    assert "/health" in [path for path, _ in again.calls] and not seen(again)

    more = build_model(tokenizer)
    tiny.perturb(more, 6)
    pool.update_weights([named(more)])
    assert pool.metrics == {"live_servers": 2} and "[server_restored]" in caplog.text
    found = pool.generate(prompts, PARAMS, seeds)
    assert_same(found, oracle_of(more, tokenizer).generate(prompts, PARAMS, seeds))
    assert seen(again) and {c.weight_version for c in found} == {2}
    assert not list(tmp_path.iterdir())


def test_answers_of_a_server_that_was_started_anew_are_drawn_by_the_others(
    doubles, tokenizer, tmp_path, trained, caplog
):
    """It answers everything, with the weights it was started with."""
    pool = pool_of(doubles, tokenizer, tmp_path)
    pool.update_weights([named(trained)])
    doubles[1].oracle, doubles[1].weight_version = make_oracle(tokenizer), "default"
    prompts, seeds = asked(2)
    found = pool.generate(prompts, PARAMS, seeds)
    assert seen(doubles[1])
    assert_same(found, oracle_of(trained, tokenizer).generate(prompts, PARAMS, seeds))
    assert pool.metrics == {"live_servers": 1} and "no longer has the weights" in caplog.text


def test_a_server_that_was_away_and_has_the_weights_is_taken_back_without_an_update(
    doubles, tokenizer, tmp_path, trained
):
    pool = pool_of(doubles, tokenizer, tmp_path, health_every=0.05)
    pool.update_weights([named(trained)])
    prompts, seeds = asked(1)
    want = oracle_of(trained, tokenizer).generate(prompts, PARAMS, seeds)

    def away(body):
        raise Refused(503, "away")

    doubles[1].hooks = {SEEN: away, "/health": away}
    assert_same(pool.generate(prompts, PARAMS, seeds), want)
    assert pool.metrics == {"live_servers": 1}
    doubles[1].hooks = {}
    doubles[1].calls.clear()
    time.sleep(0.1)
    assert_same(pool.generate(prompts, PARAMS, seeds), want)
    assert pool.metrics == {"live_servers": 2} and seen(doubles[1])


def test_without_a_server_the_run_ends_and_says_of_each_why(doubles, tokenizer):
    pool = pool_of(doubles, tokenizer)
    for double in doubles:
        kill(double)
    with raises(
        RunError, "server_unreachable", keys=("rollout.engine.url",), values=(2, "automodel resume RUN")
    ) as error:
        pool.generate(*asked(2)[:1], PARAMS, asked(2)[1])
    assert all(f"\n  {double.url}: POST" in str(error.value) for double in doubles)


def test_a_server_that_dies_during_an_update_is_left_out_and_one_that_refuses_ends_the_run(
    doubles, tokenizer, tmp_path, trained
):
    pool = pool_of(doubles, tokenizer, tmp_path)

    def dies(body):
        kill(doubles[1])
        raise ConnectionResetError

    doubles[1].hooks["/collective_rpc"] = dies
    pool.update_weights([named(trained)])
    prompts, seeds = asked(1)
    found = pool.generate(prompts, PARAMS, seeds)
    assert_same(found, oracle_of(trained, tokenizer).generate(prompts, PARAMS, seeds))
    assert pool.metrics == {"live_servers": 1}

    def refuse(body):
        raise Refused(500, "size mismatch")

    doubles[0].hooks["/collective_rpc"] = refuse
    with raises(RunError, "server_unreachable", values=("size mismatch",)):
        pool.update_weights([named(trained)])
    assert not list(tmp_path.iterdir())


def test_what_a_server_refuses_is_not_sent_to_the_next(doubles, tokenizer):
    pool = pool_of(doubles, tokenizer)

    def refuse(body):
        raise Refused(400, "too long")

    for double in doubles:
        double.hooks[SEEN] = refuse
    with raises(RunError, "server_rejected", values=(400, "too long")):
        pool.generate([[7, 8, 9]], PARAMS, [1])
    assert pool.metrics == {"live_servers": 2} and not seen(doubles[1])


def test_servers_that_give_other_things_are_refused_and_fixed_weights_stay(doubles, tokenizer):
    engines = [OpenAIEngine(Server(double.url), tokenizer, trust_logprobs=True) for double in doubles]
    pool = ServerPool(engines, concurrency=4)
    prompts, seeds = asked(1)
    assert_same(pool.generate(prompts, PARAMS, seeds), make_oracle(tokenizer).generate(prompts, PARAMS, seeds))
    with raises(RunError, "not_supported", keys=("rollout.engine",)):
        pool.update_weights([])
    doubles[1].token_ids = False
    engines[1] = OpenAIEngine(Server(doubles[1].url), tokenizer)
    with raises(ConfigError, "server_mismatch", keys=("rollout.engine.url",), values=("token_ids",)):
        ServerPool(engines, concurrency=4)


TWO = ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    ("node", "options", "code", "fix"),
    [
        (ServerConfig, {"url": []}, "empty_value", "url=http://localhost:8000"),
        (ServerConfig, {"url": ["http://a:1", "b:1"]}, "invalid_value", "url=[http://a:1,http://b:1]"),
        (ServerConfig, {"url": ["http://a:1", "http://a:1/"]}, "invalid_value", "url=[http://a:1]"),
        (ServerConfig, {"url": "a:1"}, "invalid_value", "url=http://a:1"),
        (
            VLLMConfig,
            {"url": TWO, "transport": "files", "command": "vllm serve"},
            "unsupported_combination",
            "command=null",
        ),
    ],
    ids=["none", "scheme", "twice", "one", "command"],
)
def test_addresses_are_checked(node, options, code, fix):
    with raises(ConfigError, code, keys=(fix.split("=")[0],), fix=fix):
        node(**options)
