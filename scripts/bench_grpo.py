"""CPU seconds of a GRPO step here and in TRL, the same work for both, in turns:
`python scripts/bench_grpo.py FOLDER [--steps N] [--rounds N] [--new-tokens N] [--also OVERRIDE] [--trl-microbatch N]
[--python PYTHON]`.

    automodel finetune llm -c quickstart        # in FOLDER: both start from its export
    pip install trl==1.16.0                     # nothing but this script needs it; --python: an environment that has it

32 prompts of `quickstart_grpo`, 8 responses each, one update, no reference, one thread, all samples in one microbatch
on both sides (ours 32 rows of 128 tokens, since prompts are shared). Nothing is easier for one side:
the model's end-of-sequence token is one that it never says, so every response has `--new-tokens` tokens; rewards
alternate in every group, so each is trained on. What both say of it is printed beside. A step is the difference of a
run of N steps and one of 3 N, over 2 N, in user and system seconds of the process. `--also` adds ours with one override
more, in turns with the others: `--also rollout.share_prompt_prefix=false`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL, REWARD = "runs/bench_grpo_model", "alternating"
ALSO = "also"
OURS = (
    *("logging.report=false", "validation.at_end=false", "checkpoint.every=null", "rollout.log_samples_every=null"),
    "train.microbatch_size=32",
)
ALTERNATING = """
from dataclasses import dataclass
from automodel_cli.rollout.rewards.base import BatchReward

@dataclass(frozen=True, kw_only=True)
class Alternating(BatchReward):
    def scores(self, samples):
        return [float(number % 2) for number, _ in enumerate(samples)]
"""


def prepare(folder: Path) -> None:
    """The quickstart's model with another end of sequence, and the reward, in the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = folder / "runs" / "quickstart" / "export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    tokenizer.eos_token = "<|tool|>"  # no row of the quickstart has it
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    (folder / f"{REWARD}.py").write_text(ALTERNATING)


def trl(steps: int, new_tokens: int, microbatch: int) -> None:
    """TRL's trainer in this process, in the folder of the quickstart. Prints what it says of its responses."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    from automodel_cli.data.synthetic.chat_tasks import ChatTasks

    kinds = {"last_letter": 1, "count_letters": 1}
    task = ChatTasks(num_train=5000, num_validation=256, kinds=kinds, max_length=10, seed=1)
    rows = [{"prompt": row["messages"][:-1], "answer": row["answer"]} for row in task.rows("train")]

    data = Dataset(InMemoryTable.from_pylist(rows), fingerprint="bench")  # which datasets need not find out by pickling

    def alternating(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 2) for number, _ in enumerate(completions)]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=256 // microbatch,
            num_generations=8,
            max_completion_length=new_tokens,
            temperature=1.3,
            beta=0.0,
            learning_rate=1e-6,
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(MODEL, alternating, args=config, train_dataset=data)
        trainer.train()
    rows = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    lengths = statistics.fmean(row["completions/mean_length"] for row in rows)
    equal = statistics.fmean(row["frac_reward_zero_std"] for row in rows)
    print(json.dumps({"response_length": lengths, "equal_groups": equal}))


def seconds(command: list[str], folder: Path) -> tuple[float, str]:
    """User and system time of a process and its children; what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def run_of(which: str, steps: int, arguments: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """CPU seconds of a run of so many steps, and what it says of its responses."""
    folder, new_tokens = arguments.folder.resolve(), arguments.new_tokens
    if which == "trl":
        script = [arguments.python, str(Path(__file__).resolve()), str(folder), "--new-tokens", str(new_tokens)]
        script += ["--trl-microbatch", str(arguments.trl_microbatch)]
        spent, printed = seconds([*script, "--trl", str(steps)], folder)
        return spent, json.loads(printed.splitlines()[-1])
    name = f"bench_{which}_{steps}"
    command = [
        *(sys.executable, "-m", "automodel_cli", "grpo", "llm", "-c", "quickstart_grpo", *OURS),
        *(f"model.pretrained={MODEL}", f"rollout.max_new_tokens={new_tokens}", "optimizer.lr=1e-6"),
        *("rewards=none", f"rewards.{REWARD}._target_={REWARD}.Alternating", "--trust-package", REWARD),
        *(f"train.max_steps={steps}", f"run_name={name}", "logging.every=1", "lr_scheduler.warmup_steps=0"),
        *([arguments.also] if which == ALSO else []),
    ]
    spent, _ = seconds(command, folder)
    written = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, written) if "loss" in row][-steps:]
    equal = statistics.fmean(row["num_zero_std_groups"] / row["num_groups"] for row in rows)
    return spent, {"response_length": statistics.fmean(row["response_length"] for row in rows), "equal_groups": equal}


def step_of(which: str, arguments: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """CPU seconds of one step, and what the longer run says of its responses."""
    steps = arguments.steps
    longer, said = run_of(which, 3 * steps, arguments)
    return (longer - run_of(which, steps, arguments)[0]) / (2 * steps), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--also", default=None, help="an override: measure ours with it too")
    parser.add_argument("--trl-microbatch", type=int, default=256, help="samples of TRL's, which accumulates to 256")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has TRL")
    parser.add_argument("--trl", type=int, default=None, help="so many steps of TRL in this process, and nothing else")
    arguments = parser.parse_args()
    if arguments.trl is not None:
        os.chdir(arguments.folder)
        trl(arguments.trl, arguments.new_tokens, arguments.trl_microbatch)
        return
    prepare(arguments.folder.resolve())
    contestants = ("ours", *([ALSO] if arguments.also else []), "trl")
    found: dict[str, list[float]] = {which: [] for which in contestants}
    for number in range(arguments.rounds):
        for which, values in found.items():
            spent, said = step_of(which, arguments)
            values.append(spent)
            told = ", ".join(f"{name} {value:.3g}" for name, value in said.items())
            print(f"round {number + 1}  {which:4}  {spent:.3f} CPU s a step  ({told})", flush=True)
    medians = {which: statistics.median(values) for which, values in found.items()}
    for which in contestants[:-1]:
        mine, theirs = medians[which], medians["trl"]
        print(f"median: {which} {mine:.3f}, TRL {theirs:.3f}, ratio {theirs / mine:.2f}")


if __name__ == "__main__":
    main()
