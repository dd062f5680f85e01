"""Where servers generate: what goes together, the command of a server that the run starts, and on which GPUs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config import fix_syntax
from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch.generation_servers import ADDRESSES, GenerationServers
from automodel_cli.launch.slurm_servers import RolloutNodes
from automodel_cli.rollout.engines.servers import server_launcher as own_servers
from automodel_cli.rollout.engines.servers.server_launcher import Machines
from automodel_cli.rollout.engines.servers.server_process import ServerProcess
from automodel_cli.rollout.http import Server, ServerError
from tests.errors import assert_error, raises
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

BASE = """
defaults: [grpo, {data: chat_tasks}, _self_]
model: {pretrained: Qwen/Qwen3-0.6B}
"""
VLLM = ("rollout=vllm", "rollout.engine.transport=files")
TWO = "rollout.engine.servers={num_servers: 2, gpus_per_server: 4, tensor_parallel_size: 2}"
COLOCATED = "rollout.placement=colocated"
STALE = ("objective.sampler_correction=truncate", "objective.sampler_correction_clip_max=2.0")
ALLOWED = Trust(frozenset({"command"}))


@pytest.fixture(scope="module", autouse=True)
def in_a_folder_with_a_recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("conf")
    (folder / "mine.yaml").write_text(BASE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def loaded(*overrides: str) -> Any:
    return check_config(compose("mine.yaml", overrides), ALLOWED)


def after(words: Any, option: str) -> str:
    return words[list(words).index(option) + 1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_gets_an_environment(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = loaded(
        f"rollout={engine}", "rollout.engine.transport=files", "rollout.engine.servers={}"
    ).generation_servers()
    server = Server(f"http://127.0.0.1:{free_port()}")
    with raises(RunError, "command_failed", keys=("rollout.engine.command",)) as caught:
        ServerProcess(words.words("127.0.0.1", "8000"), server, tmp_path / "log", timeout=1)
    assert caught.value.fix is not None and fix_syntax.kind(fix_syntax.alternatives(caught.value.fix)[0]) == "command"
    assert f"--python engine {engine}" in caught.value.fix


@pytest.mark.parametrize(
    "prefix", [("env", "-C", "/"), ("env", "-C", "/", "env", "PATH=/bin:/usr/bin"), ("env", "PATH=/bin")]
)
def test_env_with_options_or_a_path_of_its_own_is_started(prefix: tuple[str, ...], tmp_path: Path) -> None:
    server = Server(f"http://127.0.0.1:{free_port()}")
    with raises(RunError, "server_failed"):  # it ran, and ended
        ServerProcess([*prefix, "false"], server, tmp_path / "log", timeout=20)


def test_a_server_is_told_what_training_needs_of_it() -> None:
    servers = loaded(*VLLM, TWO, "data.seq_len=4096").generation_servers()
    words = servers.words("0.0.0.0", "8001")
    assert words[:5] == ["env", "VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "Qwen/Qwen3-0.6B"]
    assert (after(words, "--host"), after(words, "--port")) == ("0.0.0.0", "8001")
    assert after(words, "--logprobs-mode") == "processed_logprobs" and after(words, "--generation-config") == "vllm"
    assert after(words, "--max-model-len") == "4096" and after(words, "--dtype") == "auto"
    assert (after(words, "--tensor-parallel-size"), after(words, "--data-parallel-size")) == ("2", "2")
    assert not {"--enable-sleep-mode", "--gpu-memory-utilization", "--enable-expert-parallel"} & set(words)
    assert (servers.number, servers.own_gpus) == (2, 8)


def test_a_server_tells_experts_where_they_are_replayed() -> None:
    asked = loaded(*VLLM, TWO, "rollout.replay_routing=true").generation_servers().command
    assert "--enable-return-routed-experts" in asked and "VLLM_USE_V2_MODEL_RUNNER=1" in asked
    plain = loaded(*VLLM, TWO).generation_servers().command
    assert not {"--enable-return-routed-experts", "VLLM_USE_V2_MODEL_RUNNER=1"} & set(plain)


SGLANG = ("rollout=sglang",)
SHARDED = "rollout.engine.servers={num_servers: 2, gpus_per_server: 4, tensor_parallel_size: 2, expert_parallel: true}"


def test_an_sglang_server_is_told_the_same_in_its_own_words() -> None:
    servers = loaded(*SGLANG, SHARDED, "data.seq_len=4096", "rollout.replay_routing=true").generation_servers()
    words = servers.words("0.0.0.0", "30001")
    longer = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
    assert words[:6] == ["env", longer, "sglang", "serve", "--model-path", "Qwen/Qwen3-0.6B"]
    assert (after(words, "--host"), after(words, "--port")) == ("0.0.0.0", "30001") and servers.port == 30_000
    assert after(words, "--context-length") == "4102" and after(words, "--dtype") == "auto"
    assert [after(words, f"--{way}-size") for way in ("tp", "dp", "ep")] == ["2", "2", "2"]
    assert "--enable-return-routed-experts" in words
    assert not {"--enable-memory-saver", "--mem-fraction-static", "--device"} & set(words)
    assert (servers.number, servers.own_gpus) == (2, 8)
    shared = loaded(*SGLANG, TWO, COLOCATED).generation_servers()
    assert after(shared.command, "--mem-fraction-static") == "0.5" and "--enable-memory-saver" in shared.command
    assert shared.own_gpus == 0 and "--ep-size" not in shared.command
    options = "executable: [other/sglang], extra_args: [--disable-overlap-schedule]"
    on_cpu = f"rollout.engine.servers={{gpus_per_server: 0, {options}}}"
    words = loaded(*SGLANG, on_cpu).generation_servers().command
    assert words[:5] == ("env", longer, "SGLANG_USE_CPU_ENGINE=1", "other/sglang", "serve")
    assert words[-3:] == ("--device", "cpu", "--disable-overlap-schedule") and "--tp-size" not in words
    with raises(ConfigError, "untrusted_code"):
        check_config(compose("mine.yaml", [*SGLANG, on_cpu]))
    on_nodes = RolloutNodes(servers, 1, 8).begin("")
    assert 'sglang serve --model-path Qwen/Qwen3-0.6B --host 0.0.0.0 --port "$PORT" --context-length' in on_nodes
    assert "PORT=$((30000 + SLURM_LOCALID))" in on_nodes


def test_colocated_servers_sleep_and_take_their_share_of_the_trainers_gpus() -> None:
    servers = loaded(*VLLM, TWO, COLOCATED).generation_servers()
    assert after(servers.command, "--gpu-memory-utilization") == "0.5" and "--enable-sleep-mode" in servers.command
    assert servers.own_gpus == 0
    one = loaded(
        "rollout=vllm", "rollout.engine.servers={gpus_per_server: 8}", COLOCATED, "rollout.engine.transport=ipc"
    )
    words = one.generation_servers().command
    assert after(words, "--weight-transfer-config") == '{"backend": "ipc"}'
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=1" in words and words[-1] == '{"backend": "ipc"}'


def test_what_the_user_adds_needs_leave_and_comes_last() -> None:
    own = "rollout.engine.servers={gpus_per_server: 0, executable: other/vllm, extra_args: [--max-num-seqs, '64']}"
    words = loaded(*VLLM, own).generation_servers().command
    assert words[2] == "other/vllm" and words[-2:] == ("--max-num-seqs", "64")
    assert "--tensor-parallel-size" not in words
    with raises(ConfigError, "untrusted_code"):
        check_config(compose("mine.yaml", [*VLLM, own]))


def test_gpus_of_servers_are_no_gpus_of_ranks() -> None:
    separate = loaded(*VLLM, TWO)
    assert separate.num_ranks(12) == separate.gpus_to_train_on(12) == 4
    assert loaded(*VLLM, TWO, COLOCATED).num_ranks(8) == 8
    assert loaded(*VLLM, "rollout.engine.url=http://a:1").num_ranks(8) == 8
    with raises(ConfigError, "mesh_size", keys=("rollout.engine.servers.num_servers",), values=(8,)):
        separate.num_ranks(8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (VLLM, "missing_key", "rollout.engine.servers"),
        ((*VLLM, TWO, "rollout.engine.url=http://a:1"), "mutually_exclusive", "rollout.engine.url"),
        ((*VLLM, TWO, "rollout.engine.command=x"), "unsupported_combination", "rollout.engine.command"),
        (
            (*VLLM, "rollout.engine.servers={gpus_per_server: 3, tensor_parallel_size: 2}"),
            "not_divisible",
            "tensor_parallel_size",
        ),
        (
            (*VLLM, "rollout.engine.servers={gpus_per_server: 0, expert_parallel: true}"),
            "requires_setting",
            "expert_parallel",
        ),
        ((*VLLM, "rollout.engine.servers={gpu_memory_utilization: 1.5}"), "out_of_range", "gpu_memory_utilization"),
        ((*VLLM, TWO, "rollout.placement=beside"), "invalid_choice", "rollout.placement"),
        (
            (*VLLM, "rollout.engine.servers={gpus_per_server: 0}", "rollout.replay_routing=true"),
            "hardware_required",
            "rollout.engine.servers.gpus_per_server",
        ),
        (
            (*VLLM, TWO, COLOCATED, "rollout.max_off_policy_steps=1", *STALE),
            "unsupported_combination",
            "rollout.placement",
        ),
        (SGLANG, "missing_key", "rollout.engine.url"),
        ((*SGLANG, TWO, "rollout.engine.command=x"), "unsupported_combination", "rollout.engine.command"),
        (
            (*SGLANG, "rollout.engine.servers={gpus_per_server: 4, expert_parallel: true}"),
            "requires_setting",
            "tensor_parallel_size",
        ),
        ((*SGLANG, TWO, "rollout.engine.transport=broadcast"), "unsupported_combination", "rollout.engine.transport"),
        (
            (*SGLANG, TWO, COLOCATED, "rollout.engine.transport=broadcast"),
            "unsupported_combination",
            "rollout.engine.transport",
        ),
        ((*SGLANG, "rollout.engine.servers={gpu_memory_utilization: 0}"), "out_of_range", "gpu_memory_utilization"),
        (
            ("rollout=vllm", "rollout.engine.url=http://a:1", COLOCATED),
            "unsupported_combination",
            "rollout.engine.transport",
        ),
        (("rollout.placement=disaggregated",), "requires_setting", "rollout.placement"),
        (
            (*VLLM[:1], "rollout.engine.url=http://a:1", "rollout.engine.transport=ipc"),
            "requires_setting",
            "rollout.engine.transport",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], code: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(*overrides)
    assert_error(error.value.full_text, code, key)


def gpus(monkeypatch: pytest.MonkeyPatch, visible: str, *, colocated: bool, ranks: int) -> list[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return own_servers._gpus(GenerationServers(2, 2, 8000, (), colocated), 2, Machines(0, ranks, ranks))


def test_separate_servers_take_the_gpus_after_the_ranks_and_colocated_ones_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seven = "7,6,5,4,3,2,1"
    assert gpus(monkeypatch, seven, colocated=False, ranks=3) == ["4", "3", "2", "1"]
    assert gpus(monkeypatch, seven, colocated=True, ranks=4) == ["7", "6", "5", "4"]
    with raises(ConfigError, "mesh_size", keys=("rollout.engine.servers.num_servers",), values=(4, 7)):
        gpus(monkeypatch, seven, colocated=False, ranks=4)


def test_colocated_servers_are_shared_by_the_machines() -> None:
    assert own_servers._of_machine(GenerationServers(4, 4, 8000, (), True), Machines(8, 8, 16)) == 2
    with raises(ConfigError, "not_divisible", keys=("rollout.engine.servers.num_servers",), values=(3, 2)):
        own_servers._of_machine(GenerationServers(3, 4, 8000, (), True), Machines(0, 8, 16))
    with raises(ConfigError, "mesh_size", keys=("rollout.engine.servers.gpus_per_server",), values=(8,)):
        own_servers._of_machine(GenerationServers(4, 8, 8000, (), True), Machines(0, 8, 16))


LISTENS = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], "RANK" in os.environ]), flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.mark.usefixtures("one_rank")
def test_each_server_has_gpus_and_a_port_of_its_own_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", "0,1,2,3,4"), ("RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    port = free_port()
    servers = GenerationServers(2, 2, port, (sys.executable, "-c", LISTENS, "{host}", "{port}"))
    with ExitStack() as at_exit:
        urls = own_servers.start_servers(servers, tmp_path, at_exit, timeout=30)
        assert urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
        assert all(own_servers.answers(url) for url in urls)
    assert not any(own_servers.answers(url) for url in urls)
    said = [json.loads((tmp_path / f"rollout_server-{i}.log").read_text().splitlines()[0]) for i in range(2)]
    assert said == [["1,2", False], ["3,4", False]]


@pytest.mark.usefixtures("one_rank")
def test_errors_of_servers_that_the_run_starts_name_what_asked_for_them(tmp_path: Path) -> None:
    """One that a killed run has left behind holds the port; none can be given another address."""
    port = free_port()
    servers = GenerationServers(1, 0, port, (sys.executable, "-c", LISTENS.replace("CUDA_VISIBLE_DEVICES", "PATH")))
    servers = dataclasses.replace(servers, command=(*servers.command, "{host}", "{port}"))
    with ExitStack() as at_exit:
        (url,) = own_servers.start_servers(servers, tmp_path, at_exit, timeout=30)
        with raises(RunError, "server_mismatch", keys=("rollout.engine.servers",), values=(url,)) as error:
            own_servers.start_servers(servers, tmp_path, at_exit, timeout=30)
        assert error.value.fix == f"end the other server, or rollout.engine.servers.port={port + 1}"
    with raises(RunError, "server_failed", keys=("rollout.engine.servers",), values=("false", 1)):
        own_servers.start_servers(dataclasses.replace(servers, command=("false",)), tmp_path, ExitStack(), timeout=30)
    engine = dataclasses.replace(loaded(*SGLANG, TWO).rollout.engine, retries=0)
    with raises(ServerError, "server_unreachable", keys=("rollout.engine.servers",)) as gone:
        engine.at([url])[0].get("/health")
    assert "automodel resume RUN starts" in str(gone.value.fix)


@pytest.mark.usefixtures("one_rank")
def test_servers_of_the_job_are_waited_for_and_none_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES, f"http://127.0.0.1:{free_port()}")
    servers = GenerationServers(1, 0, 8000, ("false",))
    with ExitStack() as at_exit, raises(RunError, "timeout", keys=("rollout.engine.start_timeout",), values=(1, 0.1)):
        own_servers.start_servers(servers, tmp_path, at_exit, timeout=0.1)
    assert not list(tmp_path.iterdir())


def test_servers_must_fill_the_nodes_that_are_asked_for() -> None:
    four = GenerationServers(4, 4, 8000, ("vllm", "--port", "{port}", "a b"))
    nodes = RolloutNodes(four, 2, 8)
    assert nodes.on_each == 2 and """vllm --port "$PORT" 'a b' || CODE=$?""" in nodes.begin("")
    with raises(ConfigError, "not_divisible", keys=("--rollout-nodes",), values=(3,)):
        RolloutNodes(four, 3, 8)
    with raises(ConfigError, "mesh_size", keys=("rollout.engine.servers.gpus_per_server",), values=(8,)):
        RolloutNodes(four, 4, 8)
