"""Threads that compute are on the GPU of the thread that starts them. As on CUDA, each thread has a current device."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import automodel_cli
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.distributed.device_threads import on_this_device, threads_on_this_device
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.rollout.environments.event_loop import LoopThread, in_thread
from automodel_cli.run import loaders
from automodel_cli.training.checkpoint import checkpointer
from automodel_cli.training.config import CheckpointConfig

MINE = 3
ROOT = Path(automodel_cli.__file__).parent

NO_DEVICE = {
    "distributed/device_threads.py": "the pools themselves",
    "data/chat/time_limit.py": "watches chat templates, without torch",
    "data/pictures/pixels.py": "decodes pictures with PIL",
    "data/encoding/row_encoder.py": "decodes pictures with PIL",
    "data/streaming/stream_loader.py": "runs what the session prepares, which selects the device",
    "data/preparation/dataloader.py": "runs what the session prepares, which selects the device",
    "distributed/store_client.py": "talks to the store",
    "launch/cleanup_timeout.py": "ends processes, without torch",
    "launch/local_launcher.py": "watches processes, without torch",
    "training/monitors/watchdog.py": "talks to the store",
    "run/remote/remote_sync.py": "copies files",
    "rollout/rewards/remote.py": "waits for answers of servers",
    "rollout/engines/servers/server_launcher.py": "starts processes",
    "rollout/engines/servers/server_pool.py": "waits for answers of servers",
    "rollout/engines/servers/live_pool.py": "waits for answers of servers",
    "rollout/engines/servers/http_engine.py": "waits for answers of servers",
    "rollout/engines/servers/colocated.py": "waits for answers of servers",
    "rollout/weight_sync/update_requests.py": "posts requests, besides a thread that selects the device",
}
"""Files that start threads of which none touches CUDA, and why."""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`torch.cuda` of a machine with several GPUs, of which this thread has selected one."""
    current = threading.local()
    calls = {
        "is_initialized": lambda: True,
        "current_device": lambda: getattr(current, "device", 0),
        "set_device": lambda device: setattr(current, "device", device),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
    torch.cuda.set_device(MINE)
    yield torch.cuda.current_device


def test_a_new_thread_of_the_stand_in_has_device_0(devices: Any) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(devices()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_a_pool_and_a_call_select_the_device(devices: Any) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=on_this_device(lambda: seen.append(devices())))
    thread.start()
    thread.join()
    with threads_on_this_device(2) as threads:
        seen += [threads.submit(devices).result() for _ in range(3)]
    assert seen == [MINE] * 4


def test_without_cuda_a_call_stays_as_it_is() -> None:
    assert on_this_device(len) is len


def test_a_checkpoint_is_written_from_the_ranks_device(
    devices: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    write = checkpointer.write_state
    monkeypatch.setattr(checkpointer, "write_state", lambda *given: (seen.append(devices()), write(*given))[1])
    part = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(part.parameters())
    saver = checkpointer.Checkpointer(tmp_path, CheckpointConfig(async_save=True))
    monkeypatch.setattr(checkpointer, "model_state", lambda parts: dict(part.state_dict()))
    monkeypatch.setattr(checkpointer, "optimizer_state", lambda parts, optimizer: {})
    saver.save(1, [part], optimizer, SimpleNamespace(state_dict=dict))  # type: ignore[arg-type]
    saver.close()
    assert seen == [MINE]


def test_rows_are_pinned_on_the_ranks_device(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    rows = SimpleNamespace(first_rows=torch.tensor([0, 8]).numpy(), mixture=Mixture.single(), contents=[], collate=list)
    rows.row_lengths = torch.tensor([4] * 8).numpy()
    monkeypatch.setattr(loaders, "_pinned", lambda batch: seen.append(devices()))
    prepare = loaders.prepared_for(torch.device("cuda"))
    loader: Any = BatchLoader(rows, microbatch_size=1, global_batch_size=2, seed=0, shuffle=False, prepare=prepare)
    loader.next_step()
    loader.next_step()
    assert seen == [MINE] * 4


def test_kernels_are_probed_on_the_ranks_device(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flex, "flex_error", lambda *_: float(devices() != MINE))
    assert attention_flex._disagrees(torch.device("cuda", MINE), torch.bfloat16, 24, 24, None) == ""


def test_environments_run_on_the_ranks_device(devices: Any) -> None:
    loop = LoopThread("environments")

    async def both() -> list[int]:
        return [devices(), await in_thread(devices)]

    assert loop.run(both()) == [MINE, MINE]
    loop.close()


def test_every_other_thread_touches_no_device() -> None:
    """A file that starts threads either does so by `device_threads`, or is listed with its reason."""
    starts = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if "Thread" in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _starts_a_thread(node)
    }
    assert starts == set(NO_DEVICE)


def _starts_a_thread(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("Thread", "ThreadPoolExecutor"):
        return False
    target = next((word.value for word in node.keywords if word.arg == "target"), None)
    return not (isinstance(target, ast.Call) and getattr(target.func, "id", "") == "on_this_device")
