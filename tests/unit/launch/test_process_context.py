"""ProcessContext from the environment, and what a request to stop is worth."""

from __future__ import annotations

import os
import signal
import time

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch import signals
from automodel_cli.launch.process_context import ProcessContext, detect, first_host
from tests.errors import raises


def test_a_typed_command_is_local() -> None:
    assert detect({}) == ProcessContext("local", 0, 1, 0)
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert detect(batch_script).kind == "local", "inside sbatch, without srun, nobody has started ranks"
    shell = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert detect(shell).kind == "local", "srun --pty bash"


def test_torchrun() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert detect(env) == ProcessContext("torchrun", 3, 8, 1)
    with raises(ConfigError, "invalid_environment", keys=("LOCAL_RANK",), values=("RANK=3",)):
        detect({"RANK": "3", "WORLD_SIZE": "8"})


def _without_rank(env: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def test_srun_fills_in_what_torch_reads() -> None:
    env = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4,2",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
    }
    assert detect(env) == ProcessContext("srun", 5, 6, 1)
    wanted = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"}
    assert wanted.items() <= env.items()
    assert 20_000 <= int(env["MASTER_PORT"]) < 32_000
    for gpus, local_rank in (("0,1,2,3", 1), ("3", 0)):
        assert detect(_without_rank(env) | {"CUDA_VISIBLE_DEVICES": gpus}).local_rank == local_rank
    other = {**env, "SLURM_JOB_ID": "4712"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        del other[name]
    detect(other)
    assert other["MASTER_PORT"] != env["MASTER_PORT"], "two jobs on one host do not meet"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack[1-2]n[01-03]", "rack1n01"),
        ("a-b.c[10-11].example.org", "a-b.c10.example.org"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_stop_request_has_an_exit_code() -> None:
    assert signals.requested() is None and signals.exit_code() == 0
    signals.install_handlers(launched=True)
    try:
        for _ in range(2):  # the launcher decides what a second signal means
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert signals.requested() is signal.SIGTERM and signals.exit_code() == 75
        assert signals.exit_code(signal.SIGINT) == 130, "another rank's request"
        signals.install_handlers()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        signals.reset()
