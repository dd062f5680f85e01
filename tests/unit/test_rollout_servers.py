"""Engines behind HTTP: a real `transformers serve` on this machine, and a double of vLLM's documented endpoints.

vLLM itself cannot run here. The double holds a real model: what it serves is computed, and the weights it is sent are
put into it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engine import SamplingParams
from automodel_cli.rollout.hf import HFEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.openai import OpenAIEngine
from automodel_cli.rollout.vllm import VLLMEngine
from tests import tiny

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
    with pytest.raises(RunError, match="serves fixed weights"):
        engine.update_weights([])
    with pytest.raises(ConfigError, match="top_k=5 is not in OpenAI's API"):
        engine.generate(prompts, SamplingParams(top_k=5))


class VLLMDouble:
    """The documented endpoints in front of an `HFEngine`. `transfer` is the wire that NCCL is elsewhere."""

    def __init__(self, oracle: HFEngine, port: int = 0):
        self.oracle, self.calls, self.failures = oracle, [], []
        self.received: list[tuple[str, torch.Tensor]] = []
        self.transfer = Wire()
        self.token_ids = True
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({})

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                if double.failures:
                    code = double.failures.pop(0)
                    self.send_response(code)
                    self.end_headers()
                    self.wfile.write(b"not now")
                    return
                double.calls.append((self.path, body))
                content = json.dumps(double.handle(self.path, body)).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 512}]}
        if path == "/v1/completions":
            params = SamplingParams(max_new_tokens=body["max_tokens"], temperature=body["temperature"])
            (completion,) = self.oracle.generate([body["prompt"]], params, [body.get("seed", 0)])
            choice = {"text": "", "finish_reason": completion.finish_reason}
            if self.token_ids:
                choice |= {"token_ids": completion.tokens, "logprobs": {"token_logprobs": completion.logprobs}}
            return {"choices": [choice]}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            assert body["init_info"] == {"rank_offset": 1, "world_size": 2}
            self.transfer.met.wait(10)
        if path == "/start_weight_update":
            assert body == {"is_checkpoint_format": True}
            self.received = []
        if path == "/update_weights":
            info = body["update_info"]
            tensors = self.transfer.receive(len(info["names"]))
            assert [str(t.dtype) for t in tensors] == [f"torch.{name}" for name in info["dtype_names"]]
            assert [list(t.shape) for t in tensors] == info["shapes"] and info["packed"] is False
            self.received += zip(info["names"], tensors, strict=True)
        if path == "/finish_weight_update":
            self.oracle.update_weights([self.received])
        return {}


class Wire:
    packed = False

    def __init__(self):
        self.met, self._sent, self._there = threading.Event(), [], threading.Semaphore(0)

    def open(self, num_workers):
        return {"rank_offset": 1, "world_size": num_workers + 1}

    def connect(self):
        self.met.set()

    def send(self, tensors):
        for _, tensor in tensors:
            self._sent.append(tensor.clone())
            self._there.release()

    def receive(self, count):
        for _ in range(count):
            assert self._there.acquire(timeout=10)
        tensors, self._sent = self._sent[:count], self._sent[count:]
        return tensors


@pytest.fixture
def double(tokenizer):
    double = VLLMDouble(make_oracle(tokenizer))
    yield double
    double.server.shutdown()


def test_vllm_completions_are_token_in_token_out(double, tokenizer):
    engine = VLLMEngine(Server(double.url, backoff=0.01), tokenizer, double.transfer)
    assert engine.capabilities.token_ids and engine.capabilities.logprobs and engine.capabilities.weight_updates
    prompts = [[7, 8, 9], [30, 31]]
    params = SamplingParams(max_new_tokens=6, temperature=0.7)
    want = make_oracle(tokenizer).generate(prompts, params, [5, 6])
    got = engine.generate(prompts, params, [5, 6])
    assert [c.tokens for c in got] == [c.tokens for c in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_weights_go_through_the_documented_calls(double, tokenizer):
    engine = VLLMEngine(Server(double.url, backoff=0.01), tokenizer, double.transfer)
    trained = build_model(tokenizer)
    tiny.perturb(trained, 5)
    named = [(name, p.detach()) for name, p in trained.named_parameters()]
    before = engine.generate([[7, 8, 9]], GREEDY)
    for _ in range(2):
        double.calls.clear()
        engine.update_weights(iter([named[:3], named[3:]]))
    phases = ["/pause?mode=keep", "/start_weight_update", *["/update_weights"] * 2, "/finish_weight_update", "/resume"]
    assert [path for path, _ in double.calls] == phases  # the connection is made once
    after = engine.generate([[7, 8, 9]], GREEDY)
    want = HFEngine(trained, stop_token_ids=[tokenizer.eos_token_id], pad_token_id=0).generate([[7, 8, 9]], GREEDY)
    assert after[0].tokens == want[0].tokens != before[0].tokens
    assert (before[0].weight_version, after[0].weight_version) == (0, 2)


def test_a_failed_transfer_is_an_error_and_the_server_resumes(double, tokenizer):
    engine = VLLMEngine(Server(double.url, backoff=0.01), tokenizer, double.transfer)

    def break_wire(tensors):
        raise RuntimeError("the wire broke")

    double.transfer.send = break_wire
    double.transfer.receive = lambda count: [torch.zeros(1)]
    with pytest.raises(RuntimeError, match="the wire broke"):
        engine.update_weights([[("w", torch.zeros(1))]])
    assert "/resume" in [path for path, _ in double.calls] and engine.weight_version == 0


def test_a_server_that_dies_in_a_transfer_is_said_though_our_side_never_comes_back(double, tokenizer):
    engine = VLLMEngine(Server(double.url, backoff=0.01, retries=1), tokenizer, double.transfer)

    def die(count):
        double.server.shutdown()
        double.server.server_close()
        raise ConnectionAbortedError("no answer, and nobody listens any more")

    double.transfer.send = lambda tensors: threading.Event().wait()
    double.transfer.receive = die
    with pytest.raises(RunError, match=r"POST .*/update_weights failed"):
        engine.update_weights([[("w", torch.zeros(1))]])
    assert engine.weight_version == 0


@pytest.mark.parametrize("server_hangs", [True, False], ids=["both sides", "ours"])
def test_a_transfer_that_hangs_runs_into_the_time_limit(double, tokenizer, server_hangs):
    engine = VLLMEngine(Server(double.url, backoff=0.01, timeout=1.0), tokenizer, double.transfer)
    done = threading.Event()
    double.transfer.send = lambda tensors: done.wait()
    double.transfer.receive = lambda count: [torch.zeros(1)] * (done.wait() if server_hangs else 1)
    said = r"POST .*/update_weights failed: timed out" if server_hangs else "did not reach .* within 1 seconds"
    with pytest.raises(RunError, match=said):
        engine.update_weights([[("w", torch.zeros(1))]])
    done.set()
    assert double.calls[-1][0] == "/resume"


def test_a_server_that_dies_while_it_generates_is_said(double, tokenizer):
    engine = VLLMEngine(Server(double.url, backoff=0.01, retries=1), tokenizer, double.transfer)
    double.server.shutdown()
    double.server.server_close()
    with pytest.raises(RunError, match=r"POST .*/v1/completions failed \(2 tries\): .*refused"):
        engine.generate([[7, 8, 9]], GREEDY)


def test_a_server_without_token_ids_is_no_vllm(double, tokenizer):
    double.token_ids = False
    with pytest.raises((ConfigError, RunError)):
        VLLMEngine(Server(double.url, retries=0), tokenizer, double.transfer)


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(double):
    server = Server(double.url, retries=3, backoff=0.01)
    double.failures = [503, 429]
    assert server.get("/v1/models")["data"]
    double.failures = [400, 400]
    with pytest.raises(RunError, match=r"POST .*/v1/completions failed: 400 .*not now"):
        server.post("/v1/completions", {"a": 1})
    assert len(double.failures) == 1
    double.failures = [500] * 9
    with pytest.raises(RunError, match=r"\(4 tries\): 500"):
        server.get("/v1/models")


def test_no_server_is_said_in_a_sentence():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=r"(?s)2 tries.*refused.*   start the server"):
        Server(url, retries=1, backoff=0.01).get("/health")


def test_a_silent_server_runs_into_the_time_limit():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(RunError, match="timed out"):
            Server(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=0.2, retries=0).get("/health")
