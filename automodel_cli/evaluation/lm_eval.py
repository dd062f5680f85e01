"""Tasks of lm-evaluation-harness on exported models: it runs as a command, perhaps of another environment. Torch-free.

Its samples are read question by question, so that models are compared in pairs as with built-in tasks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.evaluation.scores import TaskScores
from automodel_cli.launch.environment import of_user

_INSTALL = "pip install 'lm-eval[hf]'"


@dataclass(frozen=True)
class Harness:
    """`python` must have lm-eval. `tasks` are its task names, or names defined by files in `include`. `options` are
    further options of `lm-eval run`, by name: `num_fewshot`, `limit`, `batch_size`, `gen_kwargs`, ..."""

    python: str
    tasks: tuple[str, ...]
    include: Path | None
    options: Mapping[str, str]

    def check(self) -> None:
        """Raise ConfigError if lm-eval is not installed for `python`."""
        done = subprocess.run([self.python, "-c", "import lm_eval"], capture_output=True, text=True)
        if done.returncode:
            here = self.python == sys.executable
            raise ConfigError(
                f"lm-evaluation-harness is not installed for {self.python}",
                code="missing_package",
                fix=_INSTALL if here else f"{self.python} -m {_INSTALL}",
            )

    def run(self, model: str) -> dict[str, TaskScores]:
        """Run every task on a model folder or hub id. Raises RunError with the end of the output."""
        with tempfile.TemporaryDirectory() as folder:
            command = self._command(model, Path(folder))
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=of_user())
            if done.returncode:
                last = "\n  ".join(done.stdout.strip().splitlines()[-5:])
                raise RunError(
                    f"lm-eval failed with exit code {done.returncode}:\n  {last}",
                    code="command_failed",
                    fix=" ".join(command),
                )
            return read_lm_eval_scores(Path(folder))

    def _command(self, model: str, out: Path) -> list[str]:
        known = {
            "model": "hf",
            "model_args": f"pretrained={model}",
            "tasks": ",".join(self.tasks),
            "output_path": str(out),
            "batch_size": "8",
            **({"include_path": str(self.include)} if self.include else {}),
            **self.options,
        }
        command = [self.python, "-m", "lm_eval", "run", "--log_samples"]
        if known.pop("apply_chat_template", str(_has_chat_template(model))).lower() == "true":
            command.append("--apply_chat_template")
        for name, value in known.items():
            command += [f"--{name}", value]
        return command


def read_lm_eval_scores(folder: Path) -> dict[str, TaskScores]:
    """Outcomes by task, of the samples that lm-eval wrote below `folder`: one value a question, by its number."""
    scores = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        name = path.stem.removeprefix("samples_").rpartition("_")[0]
        filters = sorted({row["filter"] for row in rows})
        measures: dict[str, list[float | None]] = {}
        rows.sort(key=lambda row: (row["filter"], row["doc_id"]))  # items and the first measure are of one filter
        for row in rows:
            for metric in row["metrics"]:
                if isinstance(row.get(metric), (int, float)):  # a perplexity is a pair, which has no mean of questions
                    label = metric if len(filters) == 1 else f"{metric}, {row['filter']}"
                    measures.setdefault(label, []).append(float(row[metric]))
        items = [_item(row) for row in rows if row["filter"] == filters[0]]
        scores[name] = TaskScores(measures, items)
    if not scores:
        raise RunError("lm-eval wrote no samples, so models cannot be compared per question", code="nothing_to_compare")
    return scores


def _item(row: Mapping[str, Any]) -> dict[str, object]:
    question = row["arguments"]["gen_args_0"]["arg_0"]
    responses = row["filtered_resps"]
    item = {"question": question, "answer": row["target"], "responses": [str(response) for response in responses]}
    return {**item, **_chosen(responses)}


def _chosen(responses: Sequence[Any]) -> dict[str, str]:
    """Return the index of the most likely choice, if the responses are pairs of a log-prob and a flag."""
    if len(responses) < 2 or not all(isinstance(pair, list) and len(pair) == 2 for pair in responses):
        return {}
    try:
        logprobs = [float(logprob) for logprob, _ in responses]
    except (TypeError, ValueError):
        return {}
    return {"chosen": str(logprobs.index(max(logprobs)))}


def _has_chat_template(model: str) -> bool:
    folder = Path(model)
    tokenizer = folder / "tokenizer_config.json"
    if (folder / "chat_template.jinja").is_file():
        return True
    return tokenizer.is_file() and "chat_template" in json.loads(tokenizer.read_text(encoding="utf-8"))


def options_of(overrides: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` as options of `lm-eval run`. Raises ConfigError."""
    options = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(
                f"{text} is not an option of lm-eval, which --harness expects in the form NAME=VALUE",
                code="invalid_value",
                keys=("--harness",),
                fix="--harness TASK num_fewshot=5",
            )
        options[name] = value
    return options
