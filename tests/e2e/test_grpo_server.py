"""A server that the run starts: waited for, logged, and gone when the run is, also when that fails.

vLLM itself cannot run here: the command starts the double of its endpoints that the tests of the engine use.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from automodel_cli.config.errors import RunError
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.server_process import ServerProcess
from tests.e2e.command import automodel
from tests.e2e.test_grpo import write_config
from tests.unit.test_rollout_servers import free_port

DOUBLE = """
import sys, time
sys.path.insert(0, {root!r})
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.unit.test_rollout_servers import VLLMDouble, make_oracle
print("the double starts", flush=True)
double = VLLMDouble(make_oracle(ByteTokenizer().build()), {port})
time.sleep(600)
"""


def double_at(folder: Path, port: int) -> list[str]:
    script = folder / "double.py"
    script.write_text(DOUBLE.format(root=str(Path(__file__).parents[2]), port=port))
    return [sys.executable, str(script)]


def answers(url: str) -> bool:
    try:
        Server(url, timeout=2, retries=0).get("/health")
    except RunError:
        return False
    return True


def test_it_is_waited_for_and_ended(tmp_path: Path) -> None:
    port = free_port()
    server, log = Server(f"http://127.0.0.1:{port}"), tmp_path / "logs" / "server.log"
    command = double_at(tmp_path, port)
    process = ServerProcess(command, server, log, timeout=60)
    try:
        assert answers(server.url) and log.read_text() == "the double starts\n"
        with pytest.raises(RunError, match="something answers at"):
            ServerProcess(command, server, log, timeout=60)
    finally:
        process.close()
    assert not answers(server.url)


@pytest.mark.parametrize(
    ("command", "timeout", "said"),
    [
        ("echo no such model; exit 3", 30, "ended with code 3"),
        ("echo no such model; (while :; do date +%N > {alive}; sleep 0.2; done) & wait", 1, "within 1 s"),
    ],
    ids=["ends", "hangs"],
)
def test_one_that_does_not_answer_is_an_error_with_its_last_words(
    tmp_path: Path, command: str, timeout: float, said: str
) -> None:
    began, alive = time.monotonic(), tmp_path / "alive"
    with pytest.raises(RunError) as error:
        url = f"http://127.0.0.1:{free_port()}"
        ServerProcess(["bash", "-c", command.format(alive=alive)], Server(url), tmp_path / "log", timeout=timeout)
    assert said in str(error.value) and "no such model" in str(error.value)
    assert time.monotonic() - began < 30
    last = alive.read_text() if alive.exists() else None
    time.sleep(1)
    assert last is None or alive.read_text() == last


def test_a_run_that_fails_ends_the_server_it_started(tmp_path: Path) -> None:
    """It fails when it first sends weights: vLLM's package, which does so, is not there."""
    write_config(tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = [
        "rollout=vllm",
        f"rollout.engine.url={url}",
        f"rollout.engine.command={json.dumps(double_at(tmp_path, port))}",
    ]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *engine, "--trust", "command")
    assert done.returncode == 1 and "vllm" in done.stderr, done.stdout + done.stderr
    log = tmp_path / "runs" / "tiny" / "logs" / "rollout_server.log"
    assert log.read_text().startswith("the double starts\n")
    assert not answers(url)
