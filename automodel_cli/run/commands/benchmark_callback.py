"""Callback of `automodel bench`: time steps, profile one more, write the results and end the run.

Torch-free at import, like everything that a config names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.callback import Callback

if TYPE_CHECKING:
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
    _state: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        self._state.update(times=_Times(), at=None, cpu=0.0, profile=None)

    def on_step(self, run: Run, step: int, values: Mapping[str, Number]) -> None:
        now, cpu, times = _now(run), time.process_time(), self._state["times"]
        if self.warmup < step <= self.warmup + self.steps and self._state["at"] is not None:
            times.seconds.append(now - self._state["at"])
            times.cpu_seconds.append(cpu - self._state["cpu"])
            times.tokens.append(int(values["num_tokens"]))
            times.label_tokens.append(int(values["num_label_tokens"]))
        profiled = None
        if step == self.warmup + self.steps + self.profile:
            profiled = self._state["profile"] and _by_kind(self._state["profile"])
            self._write(run, profiled or {})
            raise SystemExit(0)
        if step == self.warmup + self.steps:
            self._state["profile"] = _start_profile(run)
        self._state["at"], self._state["cpu"] = _now(run), time.process_time()

    def _write(self, run: Run, profiled: dict[str, float]) -> None:
        import torch

        from automodel_cli.training.metrics.peak_memory import max_over_ranks, peak_memory_gib

        device = run.mesh.device
        memory = max_over_ranks(peak_memory_gib(device), device)
        if not run.is_main:
            return
        times: _Times = self._state["times"]
        result = {
            **vars(times),
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


def _start_profile(run: Run) -> Any:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.mesh.device.type == "cuda" else [])]
    started = profile(activities=activities)
    started.start()
    return started


def _by_kind(profiled: Any) -> dict[str, float]:
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
