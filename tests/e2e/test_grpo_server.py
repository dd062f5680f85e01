"""A server that the run starts: waited for, logged, and gone when the run is, also when that fails.

The command starts the double of vLLM's endpoints that the tests of the engine use; tests/e2e/test_vllm.py has vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_cli.config.errors import RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.server_process import ServerProcess
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.http import Server
from tests.e2e.command import automodel, curve, metrics
from tests.e2e.test_grpo import TINY, samples_of, write_config
from tests.e2e.test_grpo_turns import STOPS
from tests.errors import assert_error, raises
from tests.pages import undocumented_metrics
from tests.unit.rollout.engines.servers.test_http_engine_servers import VLLMDouble, free_port

pytestmark = pytest.mark.slow

FILES = "rollout.engine.transport=files"
DOUBLE = """
import sys, time
sys.path.insert(0, {root!r})
from tests.e2e.test_grpo_server import double
print("the double starts", flush=True)
double(port={port}).hooks["/v1/completions"] = lambda body: time.sleep({delay})
time.sleep(600)
"""


def double(*stops: int, port: int = 0) -> VLLMDouble:
    """With the model of TINY, of weights of its own; `stops` end a message besides the end-of-sequence token."""
    torch.set_num_threads(1)
    config = AutoConfig.for_model(**yaml.safe_load(TINY.format(family="llama"))["model"]["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ends = [ByteTokenizer().build().eos_token_id, *stops]
    return VLLMDouble(HFEngine(model, stop_token_ids=ends, pad_token_id=0), port)


def double_at(folder: Path, port: int, delay: float = 0.0) -> list[str]:
    """The command of one; `delay` seconds precede each answer."""
    script = folder / "double.py"
    script.write_text(DOUBLE.format(root=str(Path(__file__).parents[2]), port=port, delay=delay))
    return [sys.executable, str(script)]


def answers(url: str) -> bool:
    try:
        Server(url, timeout=2, retries=0).get("/health")
    except RunError:
        return False
    return True


HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *args):
        pass
print("it starts", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_it_is_waited_for_and_ended(tmp_path: Path) -> None:
    port = free_port()
    server, log = Server(f"http://127.0.0.1:{port}"), tmp_path / "logs" / "server.log"
    command = [sys.executable, "-c", HEALTHY, str(port)]
    process = ServerProcess(command, server, log, timeout=60)
    try:
        assert answers(server.url) and log.read_text() == "it starts\n"
        with raises(RunError, "server_mismatch", keys=("rollout.engine.command",), values=(server.url,)):
            ServerProcess(command, server, log, timeout=60)
    finally:
        process.close()
    assert not answers(server.url)


@pytest.mark.parametrize(
    ("command", "timeout", "code", "value"),
    [
        ("echo no such model; exit 3", 30, "server_failed", 3),
        ("echo no such model; (while :; do date +%N > {alive}; sleep 0.2; done) & wait", 1, "timeout", 1),
    ],
    ids=["ends", "hangs"],
)
def test_one_that_does_not_answer_is_an_error_with_its_last_words(
    tmp_path: Path, command: str, timeout: float, code: str, value: int
) -> None:
    began, alive = time.monotonic(), tmp_path / "alive"
    with raises(RunError, code, keys=("rollout.engine.command",), values=(value, "no such model")):
        url = f"http://127.0.0.1:{free_port()}"
        ServerProcess(["bash", "-c", command.format(alive=alive)], Server(url), tmp_path / "log", timeout=timeout)
    assert time.monotonic() - began < 30
    last = alive.read_text() if alive.exists() else None
    time.sleep(1)
    assert last is None or alive.read_text() == last


def engine_of(folder: Path, port: int, *more: str, delay: float = 0.0) -> list[str]:
    command = json.dumps(double_at(folder, port, delay=delay))
    url = f"http://127.0.0.1:{port}"
    return [
        "rollout=vllm",
        f"rollout.engine.url={url}",
        f"rollout.engine.command={command}",
        *more,
        "--trust",
        "command",
    ]


def test_a_run_gives_its_server_the_weights_of_every_step(tmp_path: Path) -> None:
    write_config(tmp_path)
    port = free_port()
    few = ["train.max_steps=3", "rollout.log_samples_every=null", "logging.report=false", "rollout.top_p=1.0"]
    engine = engine_of(tmp_path, port, FILES, delay=0.4)
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *few, *engine)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "tiny"
    assert curve(run_dir, "token_mult_prob_error") == pytest.approx([1.0] * 3, abs=1e-5)
    assert curve(run_dir, "weight_version") == [0, 1, 2]
    for row in (row for row in metrics(run_dir) if "loss" in row):  # all samples are asked for at once
        assert 0.4 < row["idle_generate_seconds"] == pytest.approx(row["generate_seconds"])
        busy = sum(row[f"{phase}_seconds"] for phase in ("score", "train", "sync"))
        idle = row["idle_generate_seconds"] + row["idle_reward_seconds"]
        assert row["trainer_idle_fraction"] == pytest.approx(idle / (idle + busy), abs=0.1)
        if "step_seconds" in row:  # the first has no step before it
            asked = (1 - row["engine_idle_fraction"]) * row["step_seconds"]
            assert 0.38 < asked < row["generate_seconds"] + 0.1
    assert not list((run_dir / "rollout_weights").iterdir()) and not answers(f"http://127.0.0.1:{port}")


def test_of_samples_drawn_ahead_only_the_wait_is_idle_time(tmp_path: Path) -> None:
    write_config(tmp_path)
    ahead = ["train.max_steps=4", "rollout.log_samples_every=null", "logging.report=false", "rollout.top_p=1.0"]
    ahead += [
        "validation.every=null",
        "rollout.max_off_policy_steps=1",
        "objective.sampler_correction=truncate",
        "objective.sampler_correction_clip_max=2.0",
    ]
    engine = engine_of(tmp_path, free_port(), FILES, delay=1.5)
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *ahead, *engine)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in metrics(tmp_path / "runs" / "tiny") if "loss" in row]
    assert rows[0]["idle_generate_seconds"] > 1.5
    waited = [row for row in rows if row["rollout_wait_seconds"] > 1.0]  # in some steps a validation waits instead
    assert waited, "the test shows nothing"
    for row in waited:
        assert row["rollout_wait_seconds"] <= row["idle_generate_seconds"] + 0.01 < row["generate_seconds"]
        beside = row["generate_seconds"] - row["idle_generate_seconds"]
        assert beside < 1.3, "what was waited for counts twice"


def test_two_servers_share_a_run_of_conversations_in_two_environments(tmp_path: Path) -> None:
    """Adapters are trained, so that the weights which the servers get are products of two that no file has."""
    write_config(tmp_path)
    target = "automodel_cli.rollout.environments.calculator.Calculator"
    calculator = f"_target_: {target}, pattern: '([a-zA-Z0-9])', tool_call_reward: 1.0"
    environments = f"{{add: {{{calculator}, max_turns: 3, weight: 0.5}}, subtract: {{{calculator}, max_turns: 2}}}}"
    played = [
        f"rollout.environments={environments}",
        "rollout.environment_column=kind",
        "data.generator.kinds={add: 3, subtract: 1}",
        "data.seq_len=128",
        STOPS,
    ]
    few = ["train.max_steps=2", "rollout.log_samples_every=null", "logging.report=false", "rollout.top_p=1.0"]
    few += ["model.lora={rank: 4}", "optimizer.lr=3e-2"]
    servers = [double(*range(100, 260)) for _ in range(2)]  # the command runs in a process of its own
    engine = ["rollout=vllm", FILES, f"rollout.engine.url=[{','.join(server.url for server in servers)}]"]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *few, *engine, *played)
    for server in servers:
        server.server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "tiny"
    assert curve(run_dir, "token_mult_prob_error") == pytest.approx([1.0] * 2, abs=1e-5)
    assert curve(run_dir, "live_servers") == [2, 2]
    longest = {"add": 3, "subtract": 2}
    by_name = tuple(f"environment_{name}_" for name in longest)
    assert [key for key in undocumented_metrics(run_dir) if not key.startswith(by_name)] == []
    for row in (row for row in metrics(run_dir) if "loss" in row):
        mine = [sample for sample in samples_of(run_dir) if sample["step"] == row["step"]]
        for name, most in longest.items():
            of_name = [sample for sample in mine if sample["environment"] == name]
            assert row.get(f"environment_{name}_share", 0) == len(of_name) / len(mine)
            if of_name:
                assert row[f"environment_{name}_reward"] == pytest.approx(mean(s["reward"] for s in of_name))
            assert all(1 <= (len(sample["turns"]) + 1) // 2 <= most for sample in of_name)
            for sample in of_name:
                parts, weight = sample["parts"], {"add": 0.5, "subtract": 1.0}[name]
                assert sample["reward"] == parts["digit"] + 0.5 * parts["other"] + weight * parts["environment"]
        assert row["environment_failed"] == 0 and row["turns"] > 1
    assert {sample["environment"] for sample in samples_of(run_dir)} == set(longest)


def test_a_run_starts_its_servers_and_takes_turns_with_them(tmp_path: Path) -> None:
    """The command is vLLM's, in whose place the double stands. It refuses to generate asleep, and forgets its weights
    where they are to be replaced."""
    write_config(tmp_path)
    config = yaml.safe_load(TINY.format(family="llama"))["model"]["config"]
    tokenizer = ByteTokenizer().build()
    config = {**config, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    port = free_port()
    stand_in = json.dumps([sys.executable, str(Path(__file__).parents[1] / "vllm_stand_in.py")])
    own = f"rollout.engine.servers={{gpus_per_server: 0, num_servers: 2, port: {port}, executable: {stand_in}}}"
    model = ["model.config=null", "model.tokenizer=null", "model.pretrained=model"]
    few = ["train.max_steps=2", "rollout.log_samples_every=null", "logging.report=false", "rollout.top_p=1.0"]
    words = [
        "rollout=vllm",
        "rollout.placement=colocated",
        "validation.every=1",
        FILES,
        own,
        *model,
        *few,
        "--trust",
        "command",
    ]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "tiny"
    assert curve(run_dir, "token_mult_prob_error") == pytest.approx([1.0] * 2, abs=1e-5)
    assert curve(run_dir, "live_servers") == [2, 2]
    for number in range(2):
        first, *calls = (run_dir / "logs" / f"rollout_server-{number}.log").read_text().splitlines()
        told = json.loads(first)
        assert told["words"][:6] == ["serve", "model", "--host", "127.0.0.1", "--port", str(port + number)]
        assert told["environment"] == {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": None, "RANK": None}
        assert not answers(f"http://127.0.0.1:{port + number}")
        turns = ["sample", "/sleep?level=2", "/wake_up?tags=weights", "update", "/wake_up?tags=kv_cache", "sample"]
        again = ["/sleep?level=2", "/wake_up?tags=weights", "update"]
        # a token to see what it can do; after the check of log-probs come no new weights; a validation and the next
        # rollout are one turn
        check = ["sample", "update", "sample", "/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
        assert turns_of(calls) == [*check, *turns, *again, "/wake_up?tags=kv_cache", "sample"]


def turns_of(calls: list[str]) -> list[str]:
    """What a server was asked, without what each request or update consists of."""
    names = {"/v1/completions": "sample", "/collective_rpc": "update"}
    found = [names.get(call, call) for call in calls if call in names or call.startswith(("/sleep", "/wake_up"))]
    return [call for call, before in zip(found, [None, *found], strict=False) if call != before or call != "sample"]


def test_a_run_that_fails_ends_the_server_it_started(tmp_path: Path) -> None:
    write_config(tmp_path)
    port = free_port()
    (tmp_path / "file").write_text("")
    nowhere = f"rollout.engine.weights_dir={tmp_path / 'file' / 'weights'}"
    engine = engine_of(tmp_path, port, FILES, nowhere)
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *engine)
    assert done.returncode == 1, done.stdout + done.stderr
    assert_error(done.stderr, "unwritable_file", "rollout.engine.weights_dir")
    log = tmp_path / "runs" / "tiny" / "logs" / "rollout_server.log"
    assert log.read_text().startswith("the double starts\n")
    assert not answers(f"http://127.0.0.1:{port}")


def test_what_the_machine_lacks_is_said_before_the_server_is_started(tmp_path: Path) -> None:
    write_config(tmp_path)
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *engine_of(tmp_path, free_port()))
    assert done.returncode == 2 and "rollout.engine.transport=files" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "runs" / "tiny" / "logs" / "rollout_server.log").exists()
