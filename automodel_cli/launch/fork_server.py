"""Run a function on n gloo ranks, forked from a server process that has already imported torch.

    def sum_of_ranks(rank, world):                  # module level: ranks find it by name
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        return value.item()

    assert launch(sum_of_ranks, 4) == 6.0

The first launch of a process starts the server (imports, 3-6 s). Later ones take 0.1-0.4 s for 2-8 ranks, compared with
8-22 s for torch's launcher. `automodel verify` and the tests run dozens of layouts this way. Plain fork is not used,
because a child hangs if its parent ever ran an operator with more than one thread. The server never runs an operator.

Every rank has:

- one thread
- RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*, set in the rank because the server's environment is frozen at its start
- a rendezvous store of the caller, which avoids a race for free ports
- captured output, which is printed only if a rank fails
- a stack trace in case of a hang, and an end if another rank fails or the caller is interrupted
- `os._exit` at the end, because gloo's threads abort an ordinary interpreter exit in about half of the runs
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.masking_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
SECONDS_TO_REPORT = 0.5  # after the first failure, the other ranks get this long to write their own error
OUTPUT_TAIL = 6000  # characters of each failed rank's output that go into the error


class RankFailure(RuntimeError):
    """At least one rank failed. The message contains output and traceback of each failed rank."""


def launch(
    fn: Callable[..., object], world: int, *args: object, timeout: float = 120, process_group: bool = True
) -> Any:
    """Run `fn(rank, world, *args)` on `world` ranks and return rank 0's result. See `launch_all`."""
    return launch_all(fn, world, *args, timeout=timeout, process_group=process_group)[0]


def launch_all(
    fn: Callable[..., object], world: int, *args: object, timeout: float = 120, process_group: bool = True
) -> list[object]:
    """Run `fn(rank, world, *args)` on `world` ranks and return every rank's result, in rank order.

    With `process_group`, the default gloo group exists when `fn` starts and is destroyed after it. Without, `fn` has
    the environment of a torchrun worker and creates its own group. `fn` must be importable by name, and its arguments
    and results picklable.
    Raises RankFailure if a rank raises, dies, or is still running after `timeout` seconds.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            _server().Process(target=_rank_main, args=(fn, r, world, store.port, args, folder, timeout, process_group))
            for r in range(world)
        ]
        for process in processes:
            process.start()
        try:
            _join(processes, deadline=time.monotonic() + timeout + 10)
        except BaseException:  # Ctrl-C in the caller: nobody else would end the ranks
            for process in processes:
                process.kill()
            raise
        codes = [process.exitcode for process in processes]
        if any(codes):
            reports = [_report(Path(folder), rank, code) for rank, code in enumerate(codes) if code]
            called = f"{fn.__name__}{args!r}"[:200]
            raise RankFailure(f"{called}: exit codes {codes}\n" + "\n".join(reports))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def preload(*modules: str) -> None:
    """Add modules for the server to import before the first launch. Later calls have no effect.

    Of this package it imports only modules that the caller has imported, so that an import error occurs in the caller.
    """
    _more.extend(modules)


def start_server() -> None:
    """Start the server, so that it imports its modules in the background. `launch` starts it too."""
    _server()
    ensure_running()


_more: list[str] = []


@cache
def _server() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("forkserver")
    modules = [name for name in sys.modules if name.partition(".")[0] == "automodel_cli"]
    context.set_forkserver_preload([*PRELOAD, *_more, *modules])
    return context


def _join(processes: list[Any], deadline: float) -> None:
    """Wait for all ranks. After a failure or the time limit, let the others report, then kill the rest."""
    running = list(processes)
    while running:
        wait([p.sentinel for p in running], timeout=max(0.0, deadline - time.monotonic()))
        running = [p for p in running if p.is_alive()]
        failed = any(p.exitcode for p in processes if p not in running)
        if running and (failed or time.monotonic() >= deadline):
            end = time.monotonic() + SECONDS_TO_REPORT
            for p in running:
                p.join(max(0.0, end - time.monotonic()))
            for p in running:
                p.kill()
    for p in processes:
        p.join()


def _report(folder: Path, rank: int, code: int | None) -> str:
    log = folder / f"log-{rank}"
    text = log.read_text(errors="replace")[-OUTPUT_TAIL:] if log.exists() else "(died before its first line)"
    return f"--- rank {rank}, exit code {code} ---\n{text}"


def _rank_main(
    fn: Callable[..., object],
    rank: int,
    world: int,
    port: int,
    args: tuple[object, ...],
    folder: str,
    timeout: float,
    process_group: bool,
) -> None:
    gc.freeze()  # a collection would traverse all imported objects: a fifth of a short rank's time
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Python's streams may still be those of the server: give them the new descriptors, line by line.
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the caller's, no rank serves it
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TOKENIZERS_PARALLELISM="false",
    )
    code = 0
    try:
        result = _run(fn, rank, world, args, timeout, process_group)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(
    fn: Callable[..., object], rank: int, world: int, args: tuple[object, ...], timeout: float, process_group: bool
) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if process_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    result = fn(rank, world, *args)
    if process_group:
        dist.barrier()  # keep the store and connections open until every rank has finished
        dist.destroy_process_group()
    return result
