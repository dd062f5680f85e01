"""Engines behind HTTP: a real `transformers serve` on this machine, and a double of vLLM's endpoints.

The double has the routes and bodies of vLLM 0.33 (entrypoints/rl/online, serve/dev/rpc, openai/completion) and holds a
real model: what it serves is computed, and the weights it is given are put into it. tests/e2e/test_vllm.py asks the
same of a real vLLM; what is here needs a server that misbehaves.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.openai import OpenAIEngine
from automodel_cli.rollout.engines.servers.vllm import VLLMEngine
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.rollout.weight_sync.transports import FileTransfer, check_gpus
from automodel_cli.rollout.weight_sync.update_requests import Watch
from tests import tiny
from tests.errors import raises
from tests.signatures import bind

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


def build_model(tokenizer):
    torch.set_num_threads(1)
    model = tiny.build_hf("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).eval()
    model.set_attn_implementation("sdpa")
    return model


def make_oracle(tokenizer):
    return HFEngine(build_model(tokenizer), stop_token_ids=[tokenizer.eos_token_id], pad_token_id=0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def served(tokenizer, tmp_path_factory):
    """`transformers serve` with a tiny random model; its url."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    folder: Path = tmp_path_factory.mktemp("served")
    build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    port = free_port()
    code = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--device", "cpu", "--dtype", "float32"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                Server(url, timeout=5, retries=0).get("/health")
                break
            except RunError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"transformers serve did not start: {(folder / 'log').read_text()[-3000:]}")
                time.sleep(0.5)
        yield url, str(folder)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_transformers_serve_generates_what_the_library_does(served, tokenizer):
    url, name = served
    engine = OpenAIEngine(Server(url, timeout=120), tokenizer, model=name, concurrency=2)
    assert not engine.capabilities.token_ids and not engine.capabilities.logprobs
    assert not engine.capabilities.weight_updates
    prompts = [list(tokenizer(text)["input_ids"]) for text in ("What is 1 + 1?", "Repeat AB.")]
    want = make_oracle(tokenizer).generate(prompts, GREEDY)
    got = engine.generate(prompts, GREEDY)
    texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in want]
    assert [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in got] == texts
    assert [c.finish_reason for c in got] == [c.finish_reason for c in want]
    assert all(c.logprobs == [] for c in got)
    with raises(RunError, "not_supported", keys=("rollout.engine",)):
        engine.update_weights([])
    with raises(ConfigError, "not_supported", keys=("top_k",), values=(5,), fix="top_k=0"):
        engine.generate(prompts, SamplingParams(top_k=5))


class VLLMDouble:
    """vLLM's routes in front of an `HFEngine`. `answer` may be replaced by what is to go wrong at a path."""

    def __init__(self, oracle: HFEngine, port: int = 0):
        self.oracle, self.calls, self.failures = oracle, [], []
        self.hooks: dict[str, Callable[[dict], dict | None]] = {}
        self.token_ids, self.version, self.weight_version = True, "0.33.0", "default"
        self.generation_config: dict = {}
        self.asleep: set[str] = set()
        self.tells_versions = self.scale_out = False  # as the completions API does since 0.33; --enable-scale-out
        self.pace = 0.0  # seconds from token to token, where it tells versions
        self.moe_layers: list[bool] | None = None  # --enable-return-routed-experts: whether each layer has experts
        self.going, self.step = threading.Event(), threading.Lock()
        self.going.set()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({})

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                try:
                    if double.failures:
                        raise Refused(double.failures.pop(0), "not now")
                    double.calls.append((self.path, body))
                    content, code = json.dumps(double.handle(self.path, body)).encode(), 200
                except Refused as refused:
                    code, content = refused.args[0], refused.args[1].encode()
                self.send_response(code)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, path, body):
        hook = self.hooks.get(path)
        answer = None if hook is None else hook(body)
        if answer is not None:
            return answer
        if path.startswith(("/sleep?", "/wake_up?")):
            return self.sleep_or_wake(path)
        if path == "/v1/completions":
            if self.asleep:
                raise Refused(500, f"asleep: {self.asleep}")
            bind("vllm", "CompletionRequest", **body)
            choice = {"index": 0, **self.complete(body)}
            bind("vllm", "CompletionResponseChoice", **choice)
            return {"choices": [choice]}
        if path == "/inference/v1/generate":
            if not self.scale_out:
                raise Refused(403, "Scale-out endpoints are disabled.")
            bind("vllm", "GenerateRequest", **body)
            bind("vllm", "SamplingParams", **body["sampling_params"])
            return {"choices": [self.token_by_token(body["token_ids"], body["sampling_params"])]}
        if path == "/pause?mode=keep":
            self.going.clear()
            with self.step:
                return {"status": "paused"}
        if path == "/resume":
            self.going.set()
        if path == "/collective_rpc":
            bind("vllm", f"GPUModelRunner.{body['method']}", **body["kwargs"])
            if "weights" in self.asleep:
                raise Refused(500, "no memory for weights")
            files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
            self.oracle.update_weights([list(load_file(file).items()) for file in files])
            return {"results": [None]}
        if path == "/update_weight_version":
            bind("vllm", "update_weight_version", "request", **body)
            self.weight_version = body["new_version"]
        known = {
            "/health": {},
            "/version": {"version": self.version},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": 512}]},
            "/weight_info": {"weight_version": self.weight_version},
            "/update_weight_version": {"success": True},
            "/reset_prefix_cache?reset_running_requests=true": {"success": True},
            "/resume": {"status": "resumed"},
        }
        if path not in known:
            raise Refused(404, "Not Found")
        return known[path]

    def sleep_or_wake(self, path):
        """At level 2 what the weights were is forgotten."""
        if path.startswith("/wake_up?tags="):
            self.asleep.remove(path.partition("=")[2])
            return {"status": "sleeping" if self.asleep else "awake"}
        self.asleep = {"weights", "kv_cache"}
        if path == "/sleep?level=2":
            with torch.no_grad():
                for parameter in self.oracle.model.parameters():
                    parameter.zero_()
        return {"status": "sleeping"}

    def complete(self, body):
        """As `CompletionRequest.to_sampling_params`: what is not asked for is the model's generation_config.json's."""
        if not self.token_ids:
            return {"text": "a", "finish_reason": "stop"}
        if self.tells_versions and body.get("return_weight_versions"):
            choice = self.token_by_token(body["prompt"], body)
            logprobs = {"token_logprobs": [token["logprob"] for token in choice["logprobs"]["content"]]}
            return {**choice, "text": "", "logprobs": logprobs}
        asked = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **self.generation_config, **body}
        greedy = asked["temperature"] == 0
        params = SamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=asked["temperature"],
            top_p=1.0 if greedy else asked["top_p"],
            top_k=0 if greedy else max(asked["top_k"], 0),
            routing=self.moe_layers is not None,
        )
        with self.step if params.routing else nullcontext():  # what it records is of one forward at a time
            (completion,) = self.oracle.generate([body["prompt"]], params, [body.get("seed", 0)])
        logprobs = {"token_logprobs": completion.logprobs}
        reason = completion.finish_reason
        said = {"text": "", "finish_reason": reason, "token_ids": completion.tokens, "logprobs": logprobs}
        said |= self.experts_of(completion)
        return said | ({"prompt_token_ids": self.reads(body["prompt"])} if body.get("return_token_ids") else {})

    def experts_of(self, completion):
        """As `RoutedExpertsCapturer` and `numpy2base64` of vLLM 0.32: uint8 of all layers, zeros where one is dense."""
        if self.moe_layers is None:
            return {}
        with io.BytesIO() as buffer:
            np.save(buffer, self.of_all_layers(completion), allow_pickle=False)
            return {"routed_experts": base64.b64encode(buffer.getvalue()).decode("ascii")}

    def of_all_layers(self, completion):
        chosen = completion.routed_experts
        every = np.zeros((len(chosen), len(self.moe_layers), chosen.shape[2]), np.uint8)
        every[:, np.flatnonzero(self.moe_layers)] = chosen
        return every

    def reads(self, prompt):
        """The prompt as the server has it."""
        return prompt

    def token_by_token(self, prompt, asked):
        """`token_in_token_out` of vLLM 0.32: between two tokens it may be paused, and given other weights."""
        tokens, logprobs, spans = [], [], []
        one_token = SamplingParams(1, temperature=asked["temperature"], routing=self.moe_layers is not None)
        while len(tokens) < asked["max_tokens"]:
            self.going.wait()
            with self.step:
                if not self.going.is_set():
                    continue
                at = [*prompt, *tokens]
                (drawn,) = self.oracle.generate([at], one_token, [asked["seed"] * 1000 + len(tokens)])
                if not spans or spans[-1]["version"] != self.weight_version:
                    spans.append({"version": self.weight_version, "start": len(tokens)})
            tokens, logprobs = tokens + drawn.tokens, logprobs + [{"logprob": drawn.logprobs[0]}]
            spans[-1]["end"] = len(tokens)
            bind("vllm", "WeightVersionSpan", **spans[-1])
            if drawn.finish_reason == "stop":
                break
            time.sleep(self.pace)
        reason = drawn.finish_reason
        return {
            "token_ids": tokens,
            "logprobs": {"content": logprobs},
            "finish_reason": reason,
            "weight_versions": spans,
            **self.experts_of(drawn),
        }


class Refused(Exception):
    """(status, words)"""


@pytest.fixture
def double(tokenizer):
    double = VLLMDouble(make_oracle(tokenizer))
    yield double
    double.server.shutdown()


def engine_at(double, tokenizer, folder=Path("unused"), **options) -> VLLMEngine:
    return VLLMEngine(Server(double.url, backoff=0.01, **options), tokenizer, FileTransfer(folder))


def test_vllm_completions_are_token_in_token_out(double, tokenizer):
    engine = engine_at(double, tokenizer)
    assert engine.capabilities.token_ids and engine.capabilities.logprobs and engine.capabilities.weight_updates
    prompts = [[7, 8, 9], [30, 31]]
    params = SamplingParams(max_new_tokens=6, temperature=0.7)
    want = make_oracle(tokenizer).generate(prompts, params, [5, 6])
    got = engine.generate(prompts, params, [5, 6])
    assert [c.tokens for c in got] == [c.tokens for c in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@dataclass(frozen=True, kw_only=True)
class Again(Environment):
    """Asks three times, and takes longest for whoever comes first."""

    async def step(self, messages, row, state):
        count = (state or 0) + 1
        await asyncio.sleep(0.02 * (5 - row["number"]))
        return Turn(({"role": "user", "content": "7"},), reward=1.0, done=count == 3, state=count)


def episodes_of(tokenizer):
    messages = [[{"role": "user", "content": str(number)}] for number in range(5)]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [Episode(f"sample {n}", asked[n], messages[n], {"number": n}, 50 + n) for n in range(5)]


def brief(tokenizer):
    """A model that ends most of its messages."""
    stops = [tokenizer.eos_token_id, *range(100, 300)]
    return HFEngine(build_model(tokenizer), stop_token_ids=stops, pad_token_id=0)


@pytest.fixture
def talker(tokenizer):
    double = VLLMDouble(brief(tokenizer))
    yield double
    double.server.shutdown()


CHAT = SamplingParams(max_new_tokens=9, temperature=0.0)


def test_conversations_at_their_own_pace_are_those_of_one_process(talker, tokenizer):
    """The server's answers to whoever is ready, against the library's own generation turn by turn."""
    got, want = episodes_of(tokenizer), episodes_of(tokenizer)
    engine = engine_at(talker, tokenizer)
    assert engine.capabilities.at_once > 1
    with EnvironmentPool({"environment": Again()}) as pool:
        EpisodeRunner(engine, tokenizer, pool, CHAT, 300).run_async(got, 3)
        EpisodeRunner(brief(tokenizer), tokenizer, pool, CHAT, 300).run_lockstep(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.tokens == theirs.tokens and ours.rewards == theirs.rewards
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert {len(episode.rewards) for episode in got} >= {3}


def test_a_server_that_reads_other_tokens_is_told_with_turn_and_tokens(talker, tokenizer):
    talker.reads = lambda prompt: prompt if len(prompt) < 5 else [*prompt[:-1], 9]
    with (
        EnvironmentPool({"environment": Again()}) as pool,
        raises(RunError, "invalid_response", keys=("rollout.engine",)) as caught,
    ):
        EpisodeRunner(engine_at(talker, tokenizer), tokenizer, pool, CHAT, 300).run_async(episodes_of(tokenizer), 1)
    assert re.search(r"sample \d, turn 2: .* became .*, 9\] at position", str(caught.value))


def test_the_servers_generation_config_has_no_say(double, tokenizer):
    """The model's authors recommend other settings than the run has: top_k 2 would leave two tokens to draw from."""
    double.generation_config = {"top_k": 2, "top_p": 0.5, "temperature": 0.3}
    engine = engine_at(double, tokenizer)
    params = SamplingParams(max_new_tokens=8)
    want = make_oracle(tokenizer).generate([[7, 8, 9]], params, [5])
    (got,) = engine.generate([[7, 8, 9]], params, [5])
    assert got.tokens == want[0].tokens and got.logprobs == pytest.approx(want[0].logprobs, abs=1e-5)
    body = double.calls[-1][1]
    shaping = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert shaping | {"min_tokens", "ignore_eos", "stop_token_ids", "max_tokens", "seed"} <= body.keys()


def test_weights_go_through_files_that_are_gone_afterwards(double, tokenizer, tmp_path):
    engine = engine_at(double, tokenizer, tmp_path / "weights")
    trained = build_model(tokenizer)
    tiny.perturb(trained, 5)
    named = [(name, p.detach()) for name, p in trained.named_parameters()]
    before = engine.generate([[7, 8, 9]], GREEDY)
    for _ in range(2):
        double.calls.clear()
        engine.update_weights(iter([named[:3], named[3:]]))
    reset = "/reset_prefix_cache?reset_running_requests=true"
    phases = ["/weight_info", "/pause?mode=keep", "/collective_rpc", reset, "/update_weight_version", "/resume"]
    assert [path for path, _ in double.calls] == phases
    after = engine.generate([[7, 8, 9]], GREEDY)
    want = HFEngine(trained, stop_token_ids=[tokenizer.eos_token_id], pad_token_id=0).generate([[7, 8, 9]], GREEDY)
    assert after[0].tokens == want[0].tokens != before[0].tokens
    assert (before[0].weight_version, after[0].weight_version) == (0, 2)
    assert not list((tmp_path / "weights").iterdir())


def models_of(tokenizer, count):
    models = [build_model(tokenizer) for _ in range(count)]
    for seed, model in enumerate(models):
        tiny.perturb(model, 10 + seed)
    return models


@torch.no_grad()
def largest_gap(models, prompt, completion):
    """Between the reported log-probs and those of the model whose number is the version of the token."""
    drawn_T = torch.tensor(completion.tokens)
    rows = [m(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1] for m in models]
    of_models = torch.stack([row.log_softmax(-1).gather(-1, drawn_T[:, None])[:, 0] for row in rows])
    versions_T = torch.tensor(completion.versions)
    return (of_models.gather(0, versions_T[None])[0] - torch.tensor(completion.logprobs)).abs().max().item()


@pytest.mark.parametrize("told", ["tells_versions", "scale_out", None])
def test_weights_may_change_while_it_generates_and_each_token_says_which_drew_it(double, tokenizer, tmp_path, told):
    double.pace = 0.02
    if told:
        setattr(double, told, True)
    engine, models = engine_at(double, tokenizer, tmp_path), models_of(tokenizer, 3)
    engine.weight_version = -1
    engine.update_weights([list(models[0].named_parameters())])
    prompts, found = [[7, 8, 9], [30, 31], [40]], []
    seeds = range(3)
    drawing = threading.Thread(target=lambda: found.extend(engine.generate(prompts, SamplingParams(24), seeds)))
    if not told:  # the completions API answers at once here
        double.hooks["/v1/completions"] = lambda body: time.sleep(0.3)
    drawing.start()
    for model in models[1:]:
        time.sleep(0.1)
        engine.update_weights([list(model.named_parameters())])
    drawing.join()
    assert engine.weight_version == 2 and len(found) == 3
    if not told:
        assert all(set(c.versions) == {0} and c.weight_version == 0 for c in found)
        return
    assert any(c.token_versions and len(set(c.token_versions)) > 1 for c in found), "the test shows nothing"
    for prompt, completion in zip(prompts, found, strict=True):
        assert completion.versions == sorted(completion.versions)
        assert completion.weight_version == completion.versions[0]
        assert largest_gap(models, prompt, completion) < 1e-4
        assert largest_gap(models[::-1], prompt, completion) > 1e-2


def test_a_server_that_was_started_anew_is_noticed_also_where_an_update_follows(double, tokenizer, tmp_path):
    """Its answers in between were drawn with the weights it was started with."""
    engine = engine_at(double, tokenizer, tmp_path)
    parameters = [list(build_model(tokenizer).named_parameters())]
    engine.update_weights(parameters)

    def started_anew(body):
        del double.hooks["/v1/completions"]
        double.weight_version = "default"
        engine.update_weights(parameters)

    double.hooks["/v1/completions"] = started_anew
    with raises(RunError, "server_mismatch", keys=("rollout.engine.url",), fix="automodel resume RUN"):
        engine.generate([[7, 8, 9]], GREEDY)


def test_a_server_that_was_started_anew_is_noticed(double, tokenizer, tmp_path):
    """It answers, with the weights it was started with."""
    engine = engine_at(double, tokenizer, tmp_path)
    engine.update_weights([list(build_model(tokenizer).named_parameters())])
    engine.generate([[7, 8, 9]], GREEDY)
    double.weight_version = "default"
    with raises(RunError, "server_mismatch", keys=("rollout.engine.url",), fix="automodel resume RUN"):
        engine.generate([[7, 8, 9]], GREEDY)


def test_an_update_that_the_server_refuses_is_an_error_and_the_server_resumes(double, tokenizer, tmp_path):
    engine = engine_at(double, tokenizer, tmp_path)

    def refuse(body):
        raise Refused(500, "size mismatch")

    double.hooks["/collective_rpc"] = refuse
    with raises(RunError, "server_unreachable", values=("collective_rpc", 500, "size mismatch")):
        engine.update_weights([[("w", torch.zeros(1))]])
    assert double.calls[-1][0] == "/resume" and engine.weight_version == 0
    assert [path for path, _ in double.calls].count("/collective_rpc") == 1  # what was half done is not done again
    assert not list(tmp_path.iterdir())


def test_weights_that_cannot_be_written_are_said(double, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    engine = engine_at(double, tokenizer, tmp_path / "file" / "weights")
    with raises(RunError, "unwritable_file", keys=("rollout.engine.weights_dir",), values=("Not a directory",)):
        engine.update_weights([[("w", torch.zeros(1))]])
    assert "/pause?mode=keep" not in [path for path, _ in double.calls]


def test_whichever_half_of_a_transfer_fails_first_ends_it(double):
    """Our half is in a collective that the server, which has refused, never joins."""
    watch, began = Watch(Server(double.url, timeout=30)), time.monotonic()

    def ours():
        threading.Thread(target=lambda: watch.failed(RunError("the server refused"))).start()
        threading.Event().wait()

    with pytest.raises(RunError, match="the server refused"):
        watch.run(ours)
    assert time.monotonic() - began < 5
    with pytest.raises(ZeroDivisionError):
        Watch(Server(double.url)).run(lambda: 1 / 0)
    assert Watch(Server(double.url)).run(lambda: 7) == 7


def test_a_transfer_that_hangs_runs_into_the_time_limit(double):
    with raises(RunError, "weight_update_failed", keys=("rollout.engine.timeout",), values=(0.1,)):
        Watch(Server(double.url, timeout=0.1)).run(threading.Event().wait)


def test_an_older_vllm_and_another_server_are_refused(double, tokenizer):
    double.version = "0.30.2"
    with raises(ConfigError, "version_mismatch", values=("0.30.2", "0.31")):
        engine_at(double, tokenizer)
    double.version = "0.34.0.dev1+gabc"
    engine_at(double, tokenizer)

    def missing(body):
        raise Refused(404, "Not Found")

    double.hooks["/weight_info"] = missing
    with raises(ConfigError, "server_mismatch", fix="export VLLM_SERVER_DEV_MODE=1"):
        engine_at(double, tokenizer)
    double.hooks["/version"] = missing
    with raises(ConfigError, "server_mismatch", values=("/version",)):
        engine_at(double, tokenizer)


def test_a_completion_that_the_server_breaks_off_is_asked_for_again(double, tokenizer):
    engine = engine_at(double, tokenizer, retries=2)
    reasons = ["abort", "abort"]

    def broken_off(body):
        return {"choices": [{**double.complete(body), "finish_reason": reasons.pop()}]} if reasons else None

    double.hooks["/v1/completions"] = broken_off
    (got,) = engine.generate([[7, 8, 9]], GREEDY)
    assert got.finish_reason in ("stop", "length") and not reasons
    reasons += ["abort"] * 3
    with raises(RunError, "invalid_response", values=("abort", 3)):
        engine.generate([[7, 8, 9]], GREEDY)


def test_what_nccl_needs_is_said_before_a_server_is_started():
    with raises(ConfigError, "hardware_required", keys=("rollout.engine.transport",), values=("nccl", "cpu")):
        check_gpus("nccl", "cpu")
    assert find_spec("vllm") is None, "the next line shows nothing here"
    with raises(ConfigError, "missing_package", keys=("rollout.engine.transport",), values=("vllm",)):
        check_gpus("ipc", "cuda")


def test_a_server_that_dies_while_it_generates_is_said(double, tokenizer):
    engine = engine_at(double, tokenizer, retries=1)
    double.server.shutdown()
    double.server.server_close()
    with raises(RunError, "server_unreachable", values=("POST", 2)):
        engine.generate([[7, 8, 9]], GREEDY)


def test_a_server_without_token_ids_is_refused(double, tokenizer):
    double.token_ids = False
    with raises(ConfigError, "server_mismatch", keys=("rollout.engine.url",), values=("token ids",)):
        engine_at(double, tokenizer)


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(double):
    server = Server(double.url, retries=3, backoff=0.01)
    double.failures = [503, 429]
    assert server.get("/v1/models")["data"]
    double.failures = [400, 400]
    with raises(RunError, "server_rejected", values=("POST", 400, "not now")):
        server.post("/v1/completions", {"a": 1})
    assert len(double.failures) == 1
    double.failures = [500] * 9
    with raises(RunError, "server_unreachable", values=(4, 500)):
        server.get("/v1/models")


def test_no_server_is_said_in_a_sentence():
    url = f"http://127.0.0.1:{free_port()}"
    with raises(RunError, "server_unreachable", keys=("rollout.engine.url",), values=(2, "refused")):
        Server(url, retries=1, backoff=0.01).get("/health")


@pytest.mark.parametrize("first", ["the limit of the request", "the limit of the socket"])
def test_a_silent_server_runs_into_the_time_limit(first, monkeypatch):
    if first == "the limit of the socket":
        timer = threading.Timer
        monkeypatch.setattr(threading, "Timer", lambda seconds, expire: timer(60, expire))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with raises(RunError, "server_unreachable", values=("0.2 s",)):
            Server(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=0.2, retries=0).get("/health")
