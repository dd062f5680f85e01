"""CPU seconds of a GRPO step here and in TRL, on the same model and prompts, in turns:
`python scripts/bench_grpo.py FOLDER [--steps N] [--rounds N]`.

    automodel finetune llm -c quickstart        # in FOLDER: both start from its export
    pip install trl==1.16.0                     # nothing but this script needs it

32 prompts of `quickstart_grpo`, 8 responses of up to 12 tokens each, one update, no reference, one thread. A step is
the difference of a run of N steps and one of 3 N, over 2 N, in user and system seconds of the process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OURS = ("logging.report=false", "validation.at_end=false", "checkpoint.every=null", "rollout.show_every=null")


def trl(steps: int) -> None:
    """TRL's trainer in this process, in the folder of the quickstart."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    from automodel_cli.data.tasks import ChatTasks

    kinds = {"last_letter": 1, "count_letters": 1}
    task = ChatTasks(num_train=5000, num_validation=256, kinds=kinds, max_length=10, seed=1)
    rows = [{"prompt": row["messages"][:-1], "answer": row["answer"]} for row in task.rows("train")]

    data = Dataset(InMemoryTable.from_pylist(rows), fingerprint="bench")  # which datasets need not find out by pickling

    def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(c[0]["content"].strip() == str(a)) for c, a in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=256,
            num_generations=8,
            max_completion_length=12,
            temperature=1.3,
            beta=0.0,
            learning_rate=3e-4,
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            logging_steps=25,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer("runs/quickstart/export", exact, args=config, train_dataset=data)
        trainer.train()


def seconds(command: list[str], folder: Path) -> float:
    """User and system time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def step_of(which: str, steps: int, folder: Path) -> float:
    """CPU seconds of one step."""

    def run(number: int) -> float:
        if which == "trl":
            return seconds([sys.executable, str(Path(__file__).resolve()), str(folder), "--trl", str(number)], folder)
        command = [
            "grpo",
            "llm",
            "-c",
            "quickstart_grpo",
            f"train.max_steps={number}",
            f"run_name=bench_{number}",
            *OURS,
        ]
        return seconds([sys.executable, "-m", "automodel_cli", *command], folder)

    return (run(3 * steps) - run(steps)) / (2 * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", type=int, default=None, help="so many steps of TRL in this process, and nothing else")
    arguments = parser.parse_args()
    if arguments.trl is not None:
        os.chdir(arguments.folder)
        trl(arguments.trl)
        return
    found: dict[str, list[float]] = {"ours": [], "trl": []}
    for number in range(arguments.rounds):
        for which, values in found.items():
            values.append(step_of(which, arguments.steps, arguments.folder.resolve()))
            print(f"round {number + 1}  {which:4}  {values[-1]:.3f} CPU s a step", flush=True)
    ours, theirs = (statistics.median(values) for values in found.values())
    print(f"median: ours {ours:.3f}, TRL {theirs:.3f}, ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
