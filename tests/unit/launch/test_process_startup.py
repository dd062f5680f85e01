"""What a process says and sets before torch is there, and attention that is dense says so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import RunError
from automodel_cli.launch import environment, process_startup
from automodel_cli.models.attention import host_groups, kernel_selection
from automodel_cli.models.attention import kernels as attention_kernels
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.attention.ring_calls import Setting
from automodel_cli.models.attention.varlen_segments import HostDocuments
from automodel_cli.rollout.engines.servers.server_process import ServerProcess
from automodel_cli.rollout.http import Server
from tests.e2e.command import write_config


@pytest.fixture(autouse=True)
def nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.OWN, "")


def test_the_allocator_grows_segments_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # what the test sets is taken back
        monkeypatch.delenv(name)
    assert process_startup.allocator() == "torch's own"
    process_startup.grow_segments()
    assert process_startup.allocator() == "expandable_segments:True   (PYTORCH_CUDA_ALLOC_CONF)"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    process_startup.grow_segments()
    assert process_startup.allocator() == "max_split_size_mb:64   (PYTORCH_ALLOC_CONF)"


def test_buffers_registered_with_nccl_lie_in_segments_that_do_not_grow(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    without, _, after = path.read_text().partition("parallelizer:")
    path.write_text(without + after.partition("\n")[2].partition("\n")[2])
    for nccl_ub in (False, True):
        options = ("parallelizer=megatron_fsdp", f"parallelizer.nccl_ub={nccl_ub}", "parallelizer.backend=nccl")
        assert check_config(compose(path, options)).grows_segments is not nccl_ub


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "OMP_NUM_THREADS": "1",
    "AUTOMODEL_STATUS_DIR": "/status",
}


def test_a_program_that_a_rank_starts_gets_the_environment_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is a real process, started as a run starts it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_WAIT_POLICY", *LAUNCHED):
        monkeypatch.setenv(name, "")  # what the test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("MY_OWN", "kept")
    before = environment.of_user()
    assert {"MY_OWN": "kept", "HOME": os.environ["HOME"]}.items() <= before.items()
    with monkeypatch.context() as patch:
        for name, value in LAUNCHED.items():
            patch.setenv(name, value)
        process_startup.share_cores()
        process_startup.grow_segments()
        with pytest.raises(RunError, match="ended with code 3"):
            ServerProcess(
                ["sh", "-c", f"env -0 >{tmp_path}/env; exit 3"],
                Server("http://127.0.0.1:9"),
                tmp_path / "log",
                timeout=60,
            )
    found = dict(entry.split("=", 1) for entry in (tmp_path / "env").read_text().split("\0") if entry)
    assert {name: found.get(name) for name in before} == before
    assert found.keys() - before.keys() <= {"PWD", "OLDPWD", "SHLVL", "_"}


def test_a_choice_of_the_user_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process_startup.grow_segments()
    assert environment.of_user()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert environment.of_user()["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("dtype", "width", "softcap", "reason"),
    [
        (torch.bfloat16, 64, None, ""),
        (torch.bfloat16, 64, 50.0, "soft caps (here 50)"),
        (torch.float32, 64, None, "float32 (bfloat16 or float16 is required)"),
        (torch.float16, 20, None, "heads of width 20 (a multiple of 8, at most 256, is required)"),
        (torch.bfloat16, 288, None, "heads of width 288 (a multiple of 8, at most 256, is required)"),
    ],
)
def test_why_a_flash_kernel_does_not_take_a_layer(dtype, width, softcap, reason) -> None:
    query = torch.zeros(1, 2, 3, width, dtype=dtype, device="meta")
    assert attention_kernels.why_not_flash_cuda(query, query, softcap) == reason


def test_dense_attention_on_a_device_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """On the meta device, which is no CPU."""
    host_groups._warned_dense.clear()
    x = torch.zeros(1, 2, 8, 16, device="meta")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attention_packed.packed_attention(torch.nn.Module(), x, x, x, None)
    (record,) = caplog.records
    assert record.code == "high_memory_use"
    assert "float32" in record.getMessage() and "meta" in record.getMessage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_the_warning_of_dense_attention_says_what_is_kept(caplog, dtype, with_sink: bool, softcap) -> None:
    kernel_selection.choose_kernel("dense" if softcap is None else "auto", torch.device("cpu"))
    host_groups._warned_dense.clear()
    query, key, value = (torch.randn(1, heads, 512, 16, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    sink = torch.randn(4, dtype=dtype) if with_sink else None
    kept: dict[int, int] = {}

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= 4 * 2 * 256**2:  # tokens x tokens for each head
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    cu = torch.tensor([0, 256, 512], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x), caplog.at_level(logging.WARNING):
        out, _ = attention_packed.packed_attention(
            torch.nn.Module(), query, key, value, None, softcap=softcap, s_aux=sink, cu_seq_lens_q=cu
        )
    kernel_selection.choose_kernel("auto", torch.device("cpu"))
    setting = Setting(0.25, None, softcap, "dense")
    said = host_groups.dense_cost(query, setting, HostDocuments((0, 256, 512)), None)
    assert out.requires_grad and said == pytest.approx(sum(kept.values()), rel=0.01)
    assert [f"saves {said / 2**20:.3g} MiB" in record.getMessage() for record in caplog.records] == [True] * (
        softcap is not None
    )


def test_nothing_is_frozen_when_the_process_ends() -> None:
    """Extension modules report frozen objects as leaks. Functions of `atexit` run in reverse order."""
    code = (
        "import atexit, gc; from automodel_cli.launch import process_startup as start;"
        "atexit.register(lambda: print(gc.get_freeze_count())); start.enable_gc(); print(gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]
