"""A real vLLM server on the CPU, our client and a whole run on it.

AUTOMODEL_VLLM names a virtual environment with vLLM in it (docs/rollouts/vllm.md says how one is made). The model's
generation_config.json recommends what the run does not want, and the server is not told to leave it alone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.config.errors import RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.openai import OpenAIEngine
from automodel_cli.rollout.engines.servers.server_process import ServerProcess
from automodel_cli.rollout.engines.servers.vllm import VLLMEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.types import Completion, SamplingParams
from automodel_cli.rollout.weight_sync.transports import FileTransfer
from tests.e2e.command import automodel, curve, metrics, start
from tests.errors import raises
from tests.real_servers import RUN, Served, built, gap_of_versions, largest_gap, moved, prompts, saved, weights_of
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

ROOT = Path(__file__).parents[2]
VLLM = os.environ.get("AUTOMODEL_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM, reason="AUTOMODEL_VLLM names no environment with vLLM"),
    pytest.mark.timeout(400),
]


class VLLMServed(Served):
    start_timeout = 300

    def command_for(self, model: Path) -> list[str]:
        """See `Served`. The backend `wire` is a plugin in a folder of its own."""
        plugin = self.folder / "wire-0.1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: wire\nVersion: 0.1\n")
        (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nwire = tests.vllm.wire:register\n")
        self.environment = {
            "PYTHONPATH": f"{ROOT}:{self.folder}",
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled on start
        }
        return [
            *("env", *(f"{name}={value}" for name, value in self.environment.items())),
            *(f"{VLLM}/bin/vllm", "serve", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", self.port, "--dtype", "float32"),
            *("--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager", "--enable-scale-out"),
            *("--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "wire"}'),
        ]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServed]:
    served = VLLMServed(model_folder, tmp_path_factory.mktemp("served"))
    yield served
    served.end()


@pytest.fixture
def engine(served: VLLMServed, tmp_path: Path) -> VLLMEngine:
    tokenizer = ByteTokenizer().build()
    stops = [tokenizer.eos_token_id]
    return VLLMEngine(served.up().server, tokenizer, FileTransfer(tmp_path), concurrency=8, stop_token_ids=stops)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(24),
        SamplingParams(24, temperature=0.7),
        SamplingParams(24, top_k=8, top_p=0.9),
        SamplingParams(24, temperature=0.0),
    ],
    ids=["plain", "temperature", "filters", "greedy"],
)
def test_logprobs_are_the_models_whatever_its_generation_config_recommends(
    engine: VLLMEngine, model_folder: Path, params: SamplingParams
) -> None:
    engine.update_weights([weights_of(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))])
    assert largest_gap(engine, built(), params) < 1e-5


def test_more_than_the_recommended_tokens_are_drawn(engine: VLLMEngine) -> None:
    """generation_config.json would keep the 20 likeliest of 354."""
    engine.update_weights([weights_of(built())])
    (prompt, *_), model = prompts(), built()
    ranks = []
    for completion in engine.generate([prompt] * 16, SamplingParams(16), list(range(16))):
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        drawn_T1 = logits_TV.gather(-1, torch.tensor(completion.tokens)[:, None])
        ranks += (logits_TV > drawn_T1).sum(-1).tolist()
    assert max(ranks) > 100


def test_weights_from_files_are_those_that_generate(engine: VLLMEngine, tmp_path: Path) -> None:
    new, params = weights_of(moved(1)), SamplingParams(8)
    largest_gap(engine, built(), params)  # the prompts are in the prefix cache
    engine.update_weights([new[:5], new[5:]])
    assert largest_gap(engine, moved(1), params) < 1e-5
    assert largest_gap(engine, built(), params) > 0.1
    assert not list(tmp_path.iterdir())


def test_a_request_that_runs_while_weights_change_is_finished(engine: VLLMEngine) -> None:
    found: list[int] = []
    during: list[bool] = []
    # not the engine's own: which weights answer is not asked here
    generating = threading.Thread(
        target=lambda: found.extend(
            len(c.tokens)
            for c in OpenAIEngine.generate(engine, prompts()[:2] * 32, SamplingParams(200), list(range(64)))
        )
    )
    paused = engine.paused

    @contextmanager
    def watched(version: int) -> Iterator[None]:
        with paused(version):
            during.append(generating.is_alive())
            yield

    engine.paused = watched
    generating.start()
    time.sleep(0.3)
    engine.update_weights([weights_of(moved(2))])
    generating.join(60)
    assert during == [True], "the test shows nothing: all was generated before"
    assert len(found) == 64 and largest_gap(engine, moved(2), SamplingParams(8)) < 1e-5


def test_each_token_says_by_which_weights_it_was_drawn(engine: VLLMEngine) -> None:
    """Since 0.32; of 0.31 all are those of the request's beginning. Keys and values are computed again after an update,
    so log-probs are those of one model for each token."""
    models, params = [moved(4), moved(5)], SamplingParams(200)
    asked = prompts()[:2] * 32
    engine.weight_version = -1
    engine.update_weights([weights_of(models[0])])
    found: list[Completion] = []
    drawing = threading.Thread(target=lambda: found.extend(engine.generate(asked, params, list(range(64)))))
    drawing.start()
    time.sleep(0.3)
    engine.update_weights([weights_of(models[1])])
    drawing.join(60)
    assert len(found) == 64
    if engine.version < "0.32":
        assert all(set(c.versions) == {0} for c in found)
        return
    assert engine._asks_by_tokens == (engine.version < "0.33")
    assert any(len(set(completion.versions)) == 2 for completion in found), "the test shows nothing"
    for prompt, completion in zip(asked, found, strict=True):
        assert gap_of_versions(models, prompt, completion) < 1e-4


def test_what_is_aborted_is_asked_for_again(engine: VLLMEngine) -> None:
    engine.server = Server(engine.server.url, timeout=60, retries=2)
    aborted = [0]

    def abort() -> None:
        deadline = time.monotonic() + 10
        while not aborted[-1] and time.monotonic() < deadline:
            time.sleep(0.02)
            aborted.append(engine.server.post("/abort_requests")["aborted"])

    thread = threading.Thread(target=abort)
    thread.start()
    found = engine.generate(prompts()[:1] * 32, SamplingParams(200), list(range(32)))
    thread.join()
    assert aborted[-1] > 0, "the test shows nothing: all was generated before"
    assert all(c.finish_reason == "stop" or len(c.tokens) == 200 for c in found)


def sent(
    served: VLLMServed, weights: Sequence[tuple[str, torch.Tensor]], backend: str, folder: Path, urls: str | None = None
) -> tuple[int, str]:
    """What the trainer's process says, which has vLLM's package."""
    save_file({name: tensor.clone() for name, tensor in weights}, folder / "weights.safetensors")
    done = subprocess.run(
        [
            f"{VLLM}/bin/python",
            "-m",
            "tests.vllm.send",
            urls or served.server.url,
            folder / "weights.safetensors",
            backend,
        ],
        env=os.environ | served.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_weights_go_through_vllms_own_transfer(engine: VLLMEngine, served: VLLMServed, tmp_path: Path) -> None:
    """Its factory with NCCL's place taken by a socket; and NCCL's own settings, as far as they go without a GPU."""
    assert sent(served, weights_of(moved(3)), "nccl", tmp_path)[0] == 0
    code, text = sent(served, weights_of(moved(3)), "wire", tmp_path)
    assert code == 0 and "sent\n" in text, text
    assert largest_gap(engine, moved(3), SamplingParams(8)) < 1e-5


@pytest.mark.slow
def test_one_transfer_reaches_the_workers_of_two_servers(
    engine: VLLMEngine, served: VLLMServed, model_folder: Path, tmp_path: Path
) -> None:
    """Each knows its rank in the group, which comes after that of the server before it."""
    other = VLLMServed(model_folder, tmp_path).up()
    try:
        urls = f"{served.server.url},{other.server.url}"
        code, text = sent(served, weights_of(moved(6)), "wire", tmp_path, urls)
        assert code == 0 and "sent\n" in text, text
        second = VLLMEngine(
            other.server, engine.tokenizer, FileTransfer(tmp_path), stop_token_ids=engine.stop_token_ids
        )
        for each in (engine, second):
            assert largest_gap(each, moved(6), SamplingParams(8)) < 1e-5
    finally:
        other.end()


def test_what_the_server_refuses_is_said_while_our_side_waits_for_its_workers(
    engine: VLLMEngine, served: VLLMServed, tmp_path: Path
) -> None:
    """The trainer's side waits for workers to connect, without a limit, as NCCL's does."""
    began = time.monotonic()
    code, text = sent(served, weights_of(built()), "refused", tmp_path)
    assert code == 1 and "/init_weight_transfer_engine failed: 500" in text and "unforeseen" in text, text
    assert time.monotonic() - began < 40


def config(folder: Path, model: Path, served: VLLMServed) -> list[str]:
    (folder / "run.yaml").write_text(RUN.replace("MODEL", str(model)))
    return ["rollout=vllm", f"rollout.engine.url={served.server.url}", "rollout.engine.transport=files"]


def test_a_run_learns_from_what_the_server_draws(served: VLLMServed, model_folder: Path, tmp_path: Path) -> None:
    engine = config(tmp_path, model_folder, served.up())
    done = automodel(tmp_path, "grpo", "llm", "-c", "run.yaml", *engine)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "run"
    assert curve(run, "gen_kl_error") == pytest.approx([0.0] * 8, abs=1e-5)  # every step's weights arrived
    assert curve(run, "weight_version") == list(range(8))
    before, *_, after = curve(run, "val_reward")
    assert after > before + 0.2, (before, after)


def test_a_server_that_is_killed_ends_the_run_and_the_run_goes_on_with_another(
    served: VLLMServed, model_folder: Path, tmp_path: Path
) -> None:
    engine = config(tmp_path, model_folder, served.up())
    process = start(tmp_path, "grpo", "llm", "-c", "run.yaml", *engine, "train.max_steps=200")
    run = tmp_path / "runs" / "run"
    deadline = time.monotonic() + 120
    while not ((run / "metrics.jsonl").exists() and any(row.get("step", 0) >= 3 for row in metrics(run))):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    served.kill()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and f"{served.server.url}" in output and "Traceback" not in output, output
    served.up()
    resumed = automodel(tmp_path, "resume", "runs/run", "train.max_steps=6")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert max(curve(run, "gen_kl_error")) < 1e-5


def test_serve_hands_the_export_to_vllm(served: VLLMServed, model_folder: Path, tmp_path: Path) -> None:
    """By the line that the command prints; greedy, so the library's own answer is the same."""
    export = tmp_path / "runs" / "mine" / "export"
    shutil.copytree(model_folder, export)
    (export.parent / "config.yaml").touch()
    port = free_port()
    more = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command = [sys.executable, "-m", "automodel_cli", "serve", "mine", "--port", str(port), "--", *more]
    path = f"{VLLM}/bin:{os.environ['PATH']}"
    server = Server(f"http://127.0.0.1:{port}", timeout=60, retries=0)
    words = ["env", f"PATH={path}", *(f"{n}={v}" for n, v in served.environment.items()), *command]
    process = ServerProcess(["env", "-C", str(tmp_path), *words], server, tmp_path / "log", timeout=300)
    try:
        line = next(line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("curl "))
        body = json.loads(shlex.split(line)[-1])
        question = body["messages"]
        answer = server.post("/v1/chat/completions", body | {"temperature": 0, "max_tokens": 16, "top_k": -1})
        tokenizer = AutoTokenizer.from_pretrained(export)
        model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        ids = tokenizer.apply_chat_template(question, **asked)["input_ids"]
        wanted = model.generate(ids, max_new_tokens=16, do_sample=False, repetition_penalty=1.3)[0, ids.shape[1] :]
        said = answer["choices"][0]["message"]["content"]
        assert said == tokenizer.decode(wanted, skip_special_tokens=True)
    finally:
        process.close()


def test_a_model_of_another_vocabulary_is_said_at_once(engine: VLLMEngine) -> None:
    """Last: vLLM does not outlive weights that do not fit."""
    began = time.monotonic()
    with raises(RunError, "server_unreachable", values=("collective_rpc", 500)):
        engine.update_weights([weights_of(built(400))])
    assert time.monotonic() - began < 30
