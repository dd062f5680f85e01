"""Detect whether this process is an interactive command or a rank started by torchrun or srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from automodel_cli.config.errors import ConfigError


@dataclass(frozen=True)
class ProcessContext:
    """`local`: no ranks were started, and the command starts them itself. Otherwise it runs in place."""

    kind: Literal["local", "torchrun", "srun"]
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def detect(environ: MutableMapping[str, str] | None = None) -> ProcessContext:
    """Read the placement from the environment (os.environ).

    Under srun with more than one task, the variables that torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set. LOCAL_RANK is the index of this rank's GPU: 0 if Slurm shows
    each task only its own GPU. A single srun task (an interactive shell) counts as local.
    Raises ConfigError if only some of a rank's variables are set.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, or a scheduler with the same variables
        rank = int(env["RANK"])
        if "LOCAL_RANK" not in env:
            raise ConfigError(
                f"RANK={rank} is set, but LOCAL_RANK is not",
                code="invalid_environment",
                keys=("LOCAL_RANK",),
                fix="start with torchrun, or unset RANK WORLD_SIZE",
            )
        return ProcessContext("torchrun", rank, int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"]))
    num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_ID" not in env or num_tasks == 1:
        return ProcessContext("local")
    one_gpu_each = "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    placement = ProcessContext(
        "srun", int(env["SLURM_PROCID"]), num_tasks, 0 if one_gpu_each else int(env["SLURM_LOCALID"])
    )
    env.update(
        RANK=str(placement.rank),
        WORLD_SIZE=str(placement.world_size),
        LOCAL_RANK=str(placement.local_rank),
        LOCAL_WORLD_SIZE=str(_local_world_size(env)),
    )
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]))
    env.setdefault("MASTER_PORT", str(_port(env)))
    return placement


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gpu[07-09,12],login` -> `gpu07`. `hostname` may return 127.x, the
    list does not.
    """
    head = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head)


def _port(env: Mapping[str, str]) -> int:
    """Return a rendezvous port that differs between two steps on one host, below the ports that Linux assigns to
    clients.
    """
    return 20_000 + (int(env.get("SLURM_JOB_ID", "0")) * 31 + int(env["SLURM_STEP_ID"])) % 12_000


def _local_world_size(env: Mapping[str, str]) -> int:
    """Return the tasks on this node, from `SLURM_STEP_TASKS_PER_NODE` such as `8(x3),4`."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "1")):
        counts += [int(count)] * int(repeat or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[min(node, len(counts) - 1)]


def num_gpus() -> int:
    """Return the number of GPUs of this host. Imports torch only if there is a driver."""
    drivers = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    if not any(os.path.exists(path) for path in drivers):
        return 0
    import torch

    return torch.cuda.device_count()
