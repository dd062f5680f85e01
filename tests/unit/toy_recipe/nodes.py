"""Config nodes with every kind of field, and a recipe that counts steps on gloo ranks. Nothing here imports torch at
the top.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch import rank_process
from automodel_cli.launch import signals as launch_signals
from automodel_cli.run.config_root import ConfigRoot

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed


@dataclass(frozen=True)
class Adapter:
    rank: int = 8
    alpha: float = 16.0


@dataclass(frozen=True)
class Data:
    path: str
    seq_len: int = 128
    packing: Literal["best_fit", "none", "wrapped"] = "best_fit"
    weights: list[float] | None = None
    column_mapping: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mesh:
    dp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.dp_size < 1 or self.tp_size < 1:
            bad = "dp_size" if self.dp_size < 1 else "tp_size"
            raise ConfigError(f"mesh.{bad} must be at least 1", keys=(bad,), fix=f"mesh.{bad}=1")


@dataclass(frozen=True)
class Train:
    global_batch_size: int = 8
    microbatch_size: int = 1
    max_steps: int = 3
    max_restarts: int = 0
    step_seconds: float = 0.0
    deterministic: bool = False
    betas: tuple[float, float] = (0.9, 0.95)

    def require(self, tp_size: int) -> None:
        """A rule that the recipe asks for: it names its own fields."""
        if tp_size > self.max_steps:
            raise ConfigError(
                f"{self.max_steps} steps are too few", keys=("max_steps",), fix=f"train.max_steps={tp_size}"
            )


@dataclass(frozen=True)
class Fsdp:
    reshard: bool = True
    mp_policy: Any = None


@dataclass(frozen=True)
class Ddp:
    bucket_mb: int = 25


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Model:
    pretrained: str | None = None
    config: dict[str, Any] | None = None
    adapter: Adapter | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


def not_a_class() -> int:
    """A trusted package may name functions."""
    return 7


@dataclass(frozen=True)
class Recipe(ConfigRoot):
    """Counts steps; each step sums ones over the ranks. `fail` ends one rank badly, on its first `failures` starts."""

    data: Data
    optimizer: Any
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    train: Train = field(default_factory=Train)
    parallelizer: Fsdp | Ddp = field(default_factory=Fsdp)
    run_name: str | None = None
    output_dir: str = "runs"
    fail: Literal["no", "raise", "memory", "data", "hard", "crash", "oom"] = "no"
    memory_group: str | None = None
    fail_rank: int = 0
    failures: int = 1000

    def __post_init__(self) -> None:
        self.train.require(self.mesh.tp_size)
        if self.train.global_batch_size % self.mesh.dp_size:
            rows, ranks = self.train.global_batch_size, self.mesh.dp_size
            raise ConfigError(
                f"train.global_batch_size={rows} does not divide over {ranks} ranks",
                keys=("train.global_batch_size", "mesh.dp_size", "mesh.tp_size"),
                fix=f"train.global_batch_size={self.mesh.dp_size}",
            )

    def num_ranks(self, num_gpus: int) -> int:
        return self.mesh.dp_size * self.mesh.tp_size

    @property
    def max_restarts(self) -> int:
        return self.train.max_restarts

    def check_ranks(self, num_ranks: int) -> None:
        if num_ranks != self.num_ranks(0):
            raise ConfigError(f"mesh needs {self.num_ranks(0)} ranks, but there are {num_ranks}", keys=("dp_size",))

    def run(self, composed: Composed) -> int:
        rank = int(os.environ.get("RANK", "0"))
        folder = composed.run_dir or Path(self.output_dir) / (self.run_name or composed.name)
        folder.mkdir(parents=True, exist_ok=True)
        rank_process.redirect_output(folder / "logs")
        print(f"rank {rank} omp {os.environ.get('OMP_NUM_THREADS')}", flush=True)
        if rank == 0:
            rank_process.note_run_folder(folder)
        if rank == 0 and composed.run_dir is None:
            (folder / "config.yaml").write_text(composed.to_yaml())
        before = len(list(folder.glob("failed-*")))
        if self.fail != "no" and rank == self.fail_rank and before < self.failures:
            (folder / f"failed-{before + 1}").touch()
            self._fail(rank)
        return self._steps(folder, rank)

    def _fail(self, rank: int) -> None:
        if self.fail == "hard":
            os._exit(9)
        if self.fail == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fail == "oom":  # by the kernel, at the limit of a control group
            assert self.memory_group is not None
            Path(self.memory_group, "cgroup.procs").write_text(str(os.getpid()))
            print(len(b"x" * (1 << 30)))
        if self.fail == "memory":
            raise type("OutOfMemoryError", (RuntimeError,), {})("wanted 2.3 GiB")
        if self.fail == "data":
            from automodel_cli.config.errors import DataError

            raise DataError("row 7 has no supervised token", fix="data.on_invalid_row=drop")
        raise ValueError(f"rank {rank} is broken")

    def _steps(self, folder: Path, rank: int) -> int:
        done = folder / "done.json"
        first = json.loads(done.read_text())["step"] if done.exists() else 0
        world = int(os.environ.get("WORLD_SIZE", "1"))
        total, flag = 1.0, 0
        if world > 1:
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
        (folder / f"started-{rank}").touch()
        for step in range(first, self.train.max_steps):
            time.sleep(self.train.step_seconds)
            flag = launch_signals.requested() or 0
            if world > 1:
                shared = torch.tensor([1.0, float(flag)])
                dist.all_reduce(shared, op=dist.ReduceOp.SUM)
                signals = torch.tensor(float(flag))
                dist.all_reduce(signals, op=dist.ReduceOp.MAX)
                total, flag = shared[0].item(), int(signals)
            if rank == 0:
                done.write_text(json.dumps({"step": step + 1, "total": total}))
                print(f"step {step + 1} total {total:g}", flush=True)
            if flag:
                break
        if world > 1:
            dist.destroy_process_group()
        return launch_signals.exit_code(flag or None)
