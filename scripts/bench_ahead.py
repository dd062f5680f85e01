"""What drawing samples ahead is worth: a recipe at several `rollout.max_off_policy_steps`, in turns, on one
generation server.

    ENV/bin/vllm serve MODEL --port 8000 ... (docs/rollouts/vllm.md)
    python scripts/bench_ahead.py CONFIG --staleness 0 2 -- rollout=vllm rollout.engine.url=http://localhost:8000 ...

Runs are those of the command line, one after the other (0 2, 2 0, 0 2), each in a folder of its own below `--folder`.
Prints of each k: median seconds of a step and of its wait for samples, the highest staleness, and the mean reward of
the last fifth of the steps that each run had made when the fastest of its round had ended: reward per wall clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CORRECTED = ("objective.sampler_correction=truncate", "objective.sampler_correction_clip_max=2.0")


def run(arguments: argparse.Namespace, staleness: int, number: int) -> list[dict[str, Any]]:
    """The rows of the run's steps."""
    name = f"round{number}-k{staleness}"
    command = [sys.executable, "-m", "automodel_cli", "grpo", "llm", "-c", str(arguments.config), *arguments.overrides]
    own = [f"run_name={name}", f"output_dir={arguments.folder}", f"rollout.max_off_policy_steps={staleness}"]
    subprocess.run([*command, *CORRECTED, *own, "logging.every=1"], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (arguments.folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def seconds(rows: list[dict[str, Any]]) -> float:
    return sum(row["step_seconds"] for row in rows)


def reward_within(rows: list[dict[str, Any]], limit: float) -> float:
    """The mean of the last fifth of the steps that were made in so many seconds."""
    made, spent = [], 0.0
    for row in rows:
        spent += row["step_seconds"]
        if spent > limit and made:
            break
        made.append(row["reward"])
    return statistics.fmean(made[-max(1, len(made) // 5) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_ahead"))
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:end], argparse.Namespace(overrides=given[end + 1 :]))
    rounds = []
    for number in range(arguments.rounds):
        order = arguments.staleness if number % 2 == 0 else arguments.staleness[::-1]
        rounds.append({staleness: run(arguments, staleness, number) for staleness in order})
    print("| k | seconds a step | of them waited | staleness | reward at the fastest run's end |")
    print("|---|---:|---:|---:|---|")
    for staleness in arguments.staleness:
        runs = [found[staleness] for found in rounds]
        rows = [row for of_run in runs for row in of_run[1:]]  # the first step of a run has nothing to go before it
        step = statistics.median(row["step_seconds"] for row in rows)
        waited = statistics.median(row.get("rollout_wait_seconds", row["rollout_seconds"]) for row in rows)
        oldest = max(row["staleness"] for row in rows)
        fastest = [min(seconds(of_run) for of_run in found.values()) for found in rounds]
        rewards = [reward_within(of_run, limit) for of_run, limit in zip(runs, fastest, strict=True)]
        said = ", ".join(f"{reward:.3f}" for reward in rewards)
        print(f"| {staleness} | {step:.2f} | {waited:.2f} | {oldest} | {said} |")


if __name__ == "__main__":
    main()
