"""Callback of `automodel bench`: time steps, profile one more, write the results and end the run.

Torch-free at import, like everything that a config names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.callback import Callback

if TYPE_CHECKING:
    from torch.profiler import profile

    from automodel_cli.training.callback import Number, Run

# Kinds of operators and CUDA kernels by parts of their names. The first match wins.
_KINDS = (
    ("communication", ("nccl", "gloo", "c10d", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")),
    ("attention", ("flash", "fmha", "scaled_dot_product", "cudnn_sdpa", "flex_attention")),
    ("optimizer", ("adam", "muon", "foreach", "multi_tensor", "optimizer")),
    ("matrix products", ("mm", "gemm", "cutlass", "nvjet", "linear", "matmul")),
    ("copies and casts", ("copy", "_to_copy", "memcpy", "cat", "index", "gather", "scatter", "embedding")),
)


@dataclass
class _Times:
    """One entry a measured step: wall and CPU seconds of this rank's process, tokens of all ranks."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    label_tokens: list[int] = field(default_factory=list)


@dataclass
class _Progress:
    """Times so far, wall and CPU clock at the end of the previous step, and the running profiler."""

    times: _Times = field(default_factory=_Times)
    at: float | None = None
    cpu: float = 0.0
    profile: profile | None = None


@dataclass(frozen=True)
class BenchmarkCallback(Callback):
    """Times `steps` steps after `warmup` of them, writes `output` (JSON, rank 0) and ends the run there.

    A step lasts from the end of the one before to its own, device included. `profile`: one more step under torch's
    profiler, which the times leave out.
    """

    output: str
    warmup: int
    steps: int
    profile: bool = True
    _state: _Progress = field(default_factory=_Progress, init=False, repr=False, compare=False)

    def on_start(self, run: Run, state: object) -> None:
        needed = self.warmup + self.steps + self.profile
        if run.num_steps < needed:
            raise ConfigError(
                f"the run has {run.num_steps} steps, but bench needs at least {needed}: {self.warmup} warmup steps, "
                f"{self.steps} measured steps and {int(self.profile)} profiled steps",
                code="out_of_range",
                keys=("train.max_steps", "train.epochs"),
                fix=f"train.max_steps={needed} train.epochs=null",
            )

    def on_step(self, run: Run, step: int, values: Mapping[str, Number]) -> None:
        now, cpu, state = _now(run), time.process_time(), self._state
        if self.warmup < step <= self.warmup + self.steps and state.at is not None:
            state.times.seconds.append(now - state.at)
            state.times.cpu_seconds.append(cpu - state.cpu)
            state.times.tokens.append(int(values["num_tokens"]))
            state.times.label_tokens.append(int(values["num_label_tokens"]))
        if step == self.warmup + self.steps + self.profile:
            self._write(run, {} if state.profile is None else _by_kind(state.profile))
            raise SystemExit(0)
        if step == self.warmup + self.steps:
            state.profile = _start_profile(run)
        state.at, state.cpu = _now(run), time.process_time()

    def _write(self, run: Run, profiled: dict[str, float]) -> None:
        import torch

        from automodel_cli.training.metrics.peak_memory import max_over_ranks, peak_memory_gib

        device = run.mesh.device
        memory = max_over_ranks(peak_memory_gib(device), device)
        if not run.is_main:
            return
        result = {
            **vars(self._state.times),
            "memory_gib": memory,
            "ranks": run.mesh.layout.world_size,
            "layout": str(run.mesh.layout),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "breakdown": profiled,
        }
        Path(self.output).write_text(json.dumps(result), encoding="utf-8")


def _now(run: Run) -> float:
    if run.mesh.device.type == "cuda":
        import torch

        torch.cuda.synchronize(run.mesh.device)
    return time.perf_counter()


def _start_profile(run: Run) -> profile:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.mesh.device.type == "cuda" else [])]
    started = profile(activities=activities)
    started.start()
    return started


def _by_kind(profiled: profile) -> dict[str, float]:
    """Return seconds of the step by kind, from each operator's self time: kernels on a GPU, otherwise CPU time."""
    profiled.stop()
    events = profiled.key_averages()
    on_device = any(event.self_device_time_total for event in events)
    totals: dict[str, float] = {}
    for event in events:
        seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        kind = kind_of(event.key)
        totals[kind] = totals.get(kind, 0.0) + seconds
    return dict(sorted(totals.items(), key=lambda entry: -entry[1]))


def kind_of(operator: str) -> str:
    """Return the kind of an operator or CUDA kernel from its name."""
    name = operator.lower()
    return next((kind for kind, words in _KINDS if any(word in name for word in words)), "elementwise and the rest")
