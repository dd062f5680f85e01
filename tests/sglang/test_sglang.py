"""A real SGLang server on the CPU, our client and a whole run on it.

The model's generation_config.json recommends what the run does not want.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.live_pool import LivePool
from automodel_cli.rollout.engines.servers.sglang import SGLangEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.types import Completion, SamplingParams
from automodel_cli.rollout.weight_sync.broadcast import GroupTransfer
from automodel_cli.rollout.weight_sync.transports import FileTransfer, Transfer
from tests.e2e.command import automodel, curve
from tests.errors import raises
from tests.real_servers import RUN, built, gap_of_versions, largest_gap, moved, prompts, saved, weights_of
from tests.sglang.server import MARKS, SGLangServed
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

pytestmark = MARKS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SGLangServed]]:
    """Two of them."""
    both = [SGLangServed(model_folder, tmp_path_factory.mktemp("served")) for _ in range(2)]
    starting = [threading.Thread(target=one.up) for one in both]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    yield both
    for one in both:
        one.end()


def engine_at(served: SGLangServed, transfer: Transfer) -> SGLangEngine:
    tokenizer = ByteTokenizer().build()
    return SGLangEngine(served.server, tokenizer, transfer, concurrency=8, stop_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def engine(served: list[SGLangServed], tmp_path: Path) -> SGLangEngine:
    return engine_at(served[0], FileTransfer(tmp_path))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(24), SamplingParams(24, temperature=0.7), SamplingParams(24, top_k=8), SamplingParams(24, 0.0)],
    ids=["plain", "temperature", "filter", "greedy"],
)
def test_logprobs_are_the_models_whatever_its_generation_config_recommends(
    engine: SGLangEngine, params: SamplingParams
) -> None:
    engine.update_weights([weights_of(built())])
    assert largest_gap(engine, built(), params) < 1e-5


def test_weights_from_files_are_those_that_generate(engine: SGLangEngine, tmp_path: Path) -> None:
    new, params = weights_of(moved(1)), SamplingParams(8)
    largest_gap(engine, built(), params)  # the prompts are in the prefix cache
    engine.update_weights([new[:5], new[5:]])
    assert largest_gap(engine, moved(1), params) < 1e-5
    assert largest_gap(engine, built(), params) > 0.1
    assert not list(tmp_path.iterdir())


def test_each_token_says_by_which_weights_it_was_drawn_while_weights_change(engine: SGLangEngine) -> None:
    models, asked = [moved(4), moved(5)], prompts()[:2] * 4
    engine.weight_version = -1
    engine.update_weights([weights_of(models[0])])
    found: list[Completion] = []
    drawing = threading.Thread(target=lambda: found.extend(engine.generate(asked, SamplingParams(400), list(range(8)))))
    drawing.start()
    time.sleep(0.4)
    engine.update_weights([weights_of(models[1])])
    drawing.join(120)
    assert len(found) == 8
    assert any(len(set(completion.versions)) == 2 for completion in found), "the test shows nothing"
    for prompt, completion in zip(asked, found, strict=True):
        assert gap_of_versions(models, prompt, completion) < 1e-4


def test_what_is_aborted_is_asked_for_again(engine: SGLangEngine) -> None:
    paths = []

    class Counting(Server):
        def _once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
            paths.append(path)
            return super()._once(method, path, body)

    engine.server = Counting(engine.server.url, timeout=60, retries=2)
    abort = threading.Timer(0.3, lambda: engine.server._once("POST", "/pause_generation", {"mode": "abort"}))
    go_on = threading.Timer(1.5, lambda: engine.go_on())
    abort.start()
    go_on.start()
    found = engine.generate(prompts()[:1] * 4, SamplingParams(400), list(range(4)))
    assert paths.count("/generate") > 4, paths
    assert all(c.finish_reason == "stop" or len(c.tokens) == 400 for c in found)


def test_a_completion_that_the_context_cuts_is_no_sample(engine: SGLangEngine) -> None:
    """The model has a context of 512, of which SGLang keeps 2 back without a word."""
    prompt = (prompts()[2] * 8)[:500]
    greedy = SamplingParams(10, temperature=0.0)
    assert len(engine.generate([prompt], greedy)[0].tokens) == 10
    with raises(RunError, "server_mismatch", keys=("rollout.max_new_tokens",), values=(10, 12)):
        engine.generate([prompt], SamplingParams(12, temperature=0.0))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(served: list[SGLangServed], tmp_path: Path) -> None:
    """One token too many in a prompt would end the server."""
    tokenizer = ByteTokenizer().build()
    tokenizer.add_tokens([f"<{n}>" for n in range(400)])
    with raises(ConfigError, "vocabulary_mismatch", keys=("rollout.engine.url",), values=("valid range is [0, 354)",)):
        SGLangEngine(served[0].server, tokenizer, FileTransfer(tmp_path))


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_weights_are_broadcast_to_two_servers_at_once(world: None, served: list[SGLangServed]) -> None:
    """By gloo in NCCL's place; what does not fit is refused, and the next update finds no half one."""
    transfer = GroupTransfer("127.0.0.1", free_port(), torch.device("cpu"))
    engines = [engine_at(one, transfer) for one in served]
    pool = LivePool(engines, transfer, concurrency=8)
    for seed in (6, 7):
        new = weights_of(moved(seed))
        pool.update_weights([new[:5], new[5:]])
        for engine in engines:
            assert largest_gap(engine, moved(seed), SamplingParams(8)) < 1e-5
    with raises(RunError, "server_rejected", values=(400, "shape")):
        pool.update_weights([weights_of(built(400))])
    pool.update_weights([weights_of(moved(8))])
    assert all(largest_gap(engine, moved(8), SamplingParams(8)) < 1e-5 for engine in engines)


@pytest.mark.parametrize("transport", ["files", "broadcast"])
def test_a_run_learns_from_what_two_servers_draw(
    served: list[SGLangServed], model_folder: Path, tmp_path: Path, transport: str
) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("MODEL", str(model_folder)))
    urls = ",".join(one.server.url for one in served)
    words = ["rollout=sglang", f"rollout.engine.url=[{urls}]", f"rollout.engine.transport={transport}"]
    words += [f"rollout.engine.port={free_port()}"] if transport == "broadcast" else []
    words += ["train.max_steps=20"]  # SGLang's samples are others each time
    done = automodel(tmp_path, "grpo", "llm", "-c", "run.yaml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "run"
    gaps = curve(run, "gen_kl_error")  # a step whose groups are all equal has none
    assert len(gaps) > 10 and max(map(abs, gaps)) < 1e-5  # every step's weights arrived
    assert curve(run, "weight_version") == list(range(20)) and curve(run, "live_servers") == [2] * 20
    before, *_, after = curve(run, "val_reward")
    assert after > before + 0.2, (before, after)


def test_a_server_that_is_killed_is_left_out_and_the_group_is_made_anew(
    world: None, served: list[SGLangServed]
) -> None:
    """Last: one of them is gone."""
    transfer = GroupTransfer("127.0.0.1", free_port(), torch.device("cpu"))
    engines = [engine_at(one, transfer) for one in served]
    pool = LivePool(engines, transfer, concurrency=8)
    pool.update_weights([weights_of(moved(1))])
    served[1].kill()
    asked = prompts()[:2] * 4
    found = pool.generate(asked, SamplingParams(16), list(range(8)))
    assert pool.metrics == {"live_servers": 1}
    assert all(gap_of_versions([built(), moved(1)], p, c) < 1e-4 for p, c in zip(asked, found, strict=True))
    pool.update_weights([weights_of(moved(2))])
    assert largest_gap(engines[0], moved(2), SamplingParams(8)) < 1e-5
