"""Start the servers of a run: on GPUs beyond those of its ranks, or on the same GPUs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.launch.generation_servers import ADDRESSES, GenerationServers
from automodel_cli.rollout.engines.servers.server_process import ServerProcess, answers
from automodel_cli.rollout.http import Server

_POLL = 1.0  # seconds
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Machines:
    """Where this rank is: among `ranks` on its machine, of `world` on all."""

    rank: int
    ranks: int
    world: int

    @classmethod
    def of_this_rank(cls) -> Machines:
        """Return the values of the launcher's environment variables."""
        rank, world = dist.get_rank(), dist.get_world_size()
        return cls(rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)

    @property
    def number(self) -> int:
        return -(-self.world // self.ranks)

    @property
    def is_first(self) -> bool:
        """Of its machine."""
        return self.rank % self.ranks == 0


def start_servers(servers: GenerationServers, log_dir: Path, at_exit: ExitStack, *, timeout: float) -> list[str]:
    """Start servers and return the addresses of all servers once they respond. `at_exit` stops those of this rank.

    Collective. Separate servers are started by the first rank, on the GPUs of its node after those of the ranks, or
    already by the job (`launch.slurm`). Colocated servers are started by the first rank of each node.

    Raises RunError if a server does not respond within `timeout` seconds, and ConfigError if a node lacks GPUs.
    """
    given = os.environ.get(ADDRESSES)
    machines = Machines.of_this_rank()
    urls: list[str] = []
    error: Exception | None = None
    try:
        if given is not None and not servers.colocated:
            urls = given.split(",") if machines.rank == 0 else []
            _wait(urls, log_dir, timeout)
        elif machines.is_first if servers.colocated else machines.rank == 0:
            urls = _started(servers, machines, log_dir, at_exit, timeout)
    except (ConfigError, RunError) as raised:
        error = raised
    everywhere = [(urls, error)] * machines.world
    dist.all_gather_object(everywhere, (urls, error))
    for _, failed in everywhere:
        if failed is not None:
            raise failed
    return [url for of_rank, _ in everywhere for url in of_rank]


def _started(
    servers: GenerationServers, machines: Machines, log_dir: Path, at_exit: ExitStack, timeout: float
) -> list[str]:
    """The share of this machine, all started together."""
    first = 0
    number = servers.number
    if servers.colocated:
        number = _of_machine(servers, machines)
        first = machines.rank // machines.ranks * number
    gpus = _gpus(servers, number, machines)
    several = servers.colocated and machines.number > 1
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    seen, listen = (name, "0.0.0.0") if several else ("127.0.0.1", "127.0.0.1")

    def begin(i: int) -> tuple[str, ServerProcess]:
        url = f"http://{seen}:{servers.port + i}"
        words = servers.words(listen, str(servers.port + i))
        environment = {_VISIBLE: ",".join(gpus[i * servers.gpus : (i + 1) * servers.gpus])} if servers.gpus else {}
        log = log_dir / f"rollout_server-{first + i}.log"
        about = {"key": "rollout.engine.servers", "elsewhere": f"rollout.engine.servers.port={servers.port + number}"}
        return url, ServerProcess(words, Server(url), log, timeout=timeout, environment=environment, **about)

    with ThreadPoolExecutor(number) as threads:
        begun = [threads.submit(begin, i) for i in range(number)]
    for one in begun:
        if one.exception() is None:
            at_exit.callback(one.result()[1].close)
    return [one.result()[0] for one in begun]


def _of_machine(servers: GenerationServers, machines: Machines) -> int:
    if servers.number % machines.number:
        raise ConfigError(
            f"rollout.engine.servers.num_servers={servers.number} must be a multiple of the {machines.number} nodes",
            code="not_divisible",
            keys=("rollout.engine.servers.num_servers",),
            fix=f"rollout.engine.servers.num_servers={machines.number}",
        )
    number = servers.number // machines.number
    if number * servers.gpus > machines.ranks and servers.gpus:
        raise ConfigError(
            f"{number} server(s) with rollout.engine.servers.gpus_per_server={servers.gpus} need more GPUs than the "
            f"{machines.ranks} rank(s) of a node. With placement=colocated, servers use "
            "the GPUs of the ranks",
            code="mesh_size",
            keys=("rollout.engine.servers.gpus_per_server", "rollout.engine.servers.num_servers"),
            fix=f"rollout.engine.servers.num_servers={machines.number} "
            f"rollout.engine.servers.gpus_per_server={machines.ranks}",
        )
    return number


def _gpus(servers: GenerationServers, number: int, machines: Machines) -> list[str]:
    """Return the names of the GPUs of this machine's servers for CUDA_VISIBLE_DEVICES."""
    if not servers.gpus:
        return []
    named = os.environ.get(_VISIBLE)
    visible = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    begin = 0 if servers.colocated else machines.ranks
    names = visible[begin : begin + number * servers.gpus]
    if len(names) < number * servers.gpus:
        note = "" if servers.colocated else f" in addition to those of {machines.ranks} rank(s)"
        raise ConfigError(
            f"{number} server(s) with rollout.engine.servers.gpus_per_server={servers.gpus} need "
            f"{number * servers.gpus} GPUs{note}, but this machine has {len(visible)}",
            code="mesh_size",
            keys=("rollout.engine.servers.gpus_per_server", "rollout.engine.servers.num_servers"),
            fix="automodel submit --rollout-nodes 1, or rollout.engine.servers.gpus_per_server=0 for servers on the "
            "CPU",
        )
    return names


def _wait(urls: Sequence[str], log_dir: Path, timeout: float) -> None:
    """Wait until all servers of the job respond."""
    deadline = time.monotonic() + timeout
    missing = list(urls)
    while missing := [url for url in missing if not answers(url)]:
        if time.monotonic() > deadline:
            raise RunError(
                f"{', '.join(missing)} of {len(urls)} generation servers did not respond within {timeout:g} seconds. "
                f"Their logs are {log_dir}/rollout_server-*.log",
                code="timeout",
                keys=("rollout.engine.start_timeout",),
                fix="rollout.engine.start_timeout=1800",
            )
        time.sleep(_POLL)
