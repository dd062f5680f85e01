"""Benchmarks of `automodel bench`: short runs of one or two configs, and a comparison of their step times.

A run executes the user's command in a temporary folder. Two configs are compared alternately (A B, B A, ...), so that a
machine that becomes slower affects both. Every step of a round trains on the same data.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import RunError

_QUIET = (
    "validation.every=null",
    "validation.at_start=false",
    "checkpoint.every=null",
    "checkpoint.resume=null",
    "logging.every=1",
    "logging.console=plain",
    "logging.trackers=[]",
    "logging.report=false",
)
_LAST_LINES = 12


@dataclass(frozen=True)
class Config:
    """A config to measure: the arguments of `automodel finetune llm`, and a display name."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class BenchTimes:
    """Measured steps of one run, see `stopwatch.Stopwatch`."""

    seconds: list[float]
    cpu_seconds: list[float]
    tokens: list[int]
    label_tokens: list[int]
    memory_gib: float
    ranks: int
    layout: str
    device: str
    breakdown: dict[str, float]
    mfu: list[float]
    """MFU of the steps. Empty if the GPU's peak or the model's FLOPs are unknown."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu_median(self) -> float:
        return statistics.median(self.cpu_seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def measure_config(config: Config, *, warmup: int, steps: int, profile: bool) -> BenchTimes:
    """Run one config and return its times. Raises RunError, with the end of the output, if the run fails."""
    with tempfile.TemporaryDirectory(prefix="automodel-bench-") as folder:
        output = Path(folder) / "times.json"
        target = "automodel_cli.run.commands.benchmark_callback.BenchmarkCallback"
        watch = (
            f"callbacks=[{{_target_: {target}, output: '{output}', "
            f"warmup: {warmup}, steps: {steps}, profile: {str(profile).lower()}}}]"
        )
        command = [sys.executable, "-m", "automodel_cli", "finetune", "llm", *config.arguments]
        command += [*_QUIET, f"output_dir={folder}", "run_name=null", watch]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
        if not output.is_file():
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
            raise RunError(
                f"{config.name} could not be measured: its run ended with exit code {done.returncode}:\n{tail}",
                code="command_failed",
            )
        result = json.loads(output.read_text(encoding="utf-8"))
        (rows,) = Path(folder).glob("*/metrics.jsonl")
        steps_of_run = map(json.loads, rows.read_text(encoding="utf-8").splitlines())
        mfu = [row["mfu"] for row in steps_of_run if warmup < row["step"] <= warmup + steps and row.get("mfu")]
        return BenchTimes(**result, mfu=mfu)


def run_bench(config: Config, *, warmup: int, steps: int, json_file: Path | None) -> int:
    """Measure one config and print it. Returns 0."""
    times = measure_config(config, warmup=warmup, steps=steps, profile=True)
    print("\n".join(_lines(config.name, times, warmup)))
    _write(json_file, {"name": config.name, "warmup": warmup, **_as_json(times)})
    return 0


def compare_configs(a: Config, b: Config, *, warmup: int, steps: int, rounds: int, json_file: Path | None) -> int:
    """Measure two configs in turns and print their ratio. Returns 0."""
    by_config: dict[str, list[BenchTimes]] = {"A": [], "B": []}
    for turn in range(rounds):
        for label in ("AB", "BA")[turn % 2]:
            config = a if label == "A" else b
            print(f"round {turn + 1} of {rounds}: {label} ...", file=sys.stderr, flush=True)
            by_config[label].append(measure_config(config, warmup=warmup, steps=steps, profile=turn == 0))
    for label, config in (("A", a), ("B", b)):
        print("\n".join(_lines(f"{label}  {config.name}", _joined(by_config[label]), warmup)) + "\n")
    pairs = list(zip(by_config["A"], by_config["B"], strict=True))
    same = all(x.tokens == y.tokens and x.label_tokens == y.label_tokens for x, y in pairs)
    clocks: dict[str, Callable[[BenchTimes], float]] = {"wall": lambda t: t.median, "CPU": lambda t: t.cpu_median}
    ratios = {name: [clock(x) / clock(y) for x, y in pairs] for name, clock in clocks.items()}
    if by_config["A"][0].device != "cpu":
        del ratios["CPU"]
    for name, of_rounds in ratios.items():
        middle = statistics.median(of_rounds)
        print(f"A's {name} time of a step over B's: {middle:.2f} ({_range(of_rounds)} over rounds)")
    print(_verdict(ratios["CPU" if "CPU" in ratios else "wall"]))
    if not same:
        print("the steps of A and B have different numbers of tokens: compare tokens/s, and ignore small differences")
    sides = {label: [_as_json(times) for times in runs] for label, runs in by_config.items()}
    _write(json_file, {"a": a.name, "b": b.name, "same_rows": same, "a_over_b": ratios, **sides})
    return 0


def _verdict(ratios: Sequence[float]) -> str:
    if min(ratios) > 1:
        return "B is faster in every round"
    return "A is faster in every round" if max(ratios) < 1 else "neither is faster in every round"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _joined(runs: Sequence[BenchTimes]) -> BenchTimes:
    """Merge the steps of several runs. The breakdown is that of the first one."""

    def all_of(name: str) -> list[object]:
        return [value for run in runs for value in getattr(run, name)]

    lists: dict[str, Any] = {name: all_of(name) for name in ("seconds", "cpu_seconds", "tokens", "label_tokens", "mfu")}
    return replace(runs[0], memory_gib=max(run.memory_gib for run in runs), **lists)


def _lines(name: str, times: BenchTimes, warmup: int) -> list[str]:
    ordered = sorted(times.seconds)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    rate = times.tokens_per_second
    lines = [
        f"{name}: {len(ordered)} steps after {warmup}, {times.ranks} x {times.device} ({times.layout})",
        f"  step      {times.median:.4g} s median, {low:.4g} to {high:.4g} (10% to 90%)",
        f"  CPU       {times.cpu_median:.4g} s a step (rank 0's process)",
        f"  tokens/s  {rate:,.0f}, {rate / times.ranks:,.0f} a rank",
        f"  memory    {times.memory_gib:.2f} GiB at the peak of a rank",
    ]
    if times.mfu:
        lines.append(f"  MFU       {statistics.median(times.mfu):.1%}")
    total = sum(times.breakdown.values())
    shares = [f"{kind} {seconds / total:.0%}" for kind, seconds in times.breakdown.items() if total]
    return [*lines, f"  one step  {', '.join(shares)}"] if shares else lines


def _as_json(times: BenchTimes) -> dict[str, object]:
    derived = {"median_seconds": times.median, "tokens_per_second": times.tokens_per_second}
    return {**vars(times), **derived}


def _write(path: Path | None, found: Mapping[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"written to {path}")
