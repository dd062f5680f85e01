"""Tasks of `reasoning-gym` (extra `rewards`): prompts with a verifier. Torch-free."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.value_checks import check_minimums, require_package
from automodel_cli.rollout.rewards.base import Reward, RewardInput
from automodel_cli.rollout.rewards.safe_eval import guard_eval, guard_sympy

_VERSION = 1  # part of every cache key


@dataclass(frozen=True)
class ReasoningTasks:
    """Rows of a procedural task (`leg_counting`, `basic_arithmetic`, ..., about 100 exist), for `data.generator`.
    `options` are options of the task (size, difficulty). Validation rows use another seed and none of the training
    questions."""

    task: str
    """Name of a procedural task of reasoning-gym (`leg_counting`, `basic_arithmetic`, ...)."""
    num_train: int = 10_000
    """Rows to train on."""
    num_validation: int = 256
    """Held-out rows."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself, such as sizes and difficulty."""
    instruction: str = "Give the answer alone."
    """Text after every question."""
    seed: int = 0
    """Seed of the training rows. Validation rows have another seed and none of the training questions."""

    def __post_init__(self) -> None:
        check_minimums(self, num_train=1, num_validation=0)

    def rows(self, split: Literal["train", "validation"]) -> Iterator[dict[str, Any]]:
        """Yield dicts with `messages` (user, assistant), `answer`, `kind` and `entry` (data of the verifier).

        Raises ConfigError for a missing package or an unknown task, and DataError if too few questions are new.
        """
        train = self._entries(self.seed, self.num_train)
        if split == "train":
            yield from map(self._row, train)
            return
        questions = {entry["question"] for entry in train}
        count = 0
        for entry in self._entries(self.seed + 1_000_003, 20 * self.num_validation):
            if count == self.num_validation:
                return
            if entry["question"] not in questions:
                questions.add(entry["question"])
                count += 1
                yield self._row(entry)
        if count < self.num_validation:
            raise DataError(
                f"num_validation={self.num_validation} must be at most {count}, the number of questions of "
                f"{self.task} that are not among its {self.num_train} training rows",
                code="not_enough_rows",
                keys=("num_validation",),
                fix=f"num_validation={count}",
            )

    def cache_key(self) -> str:
        """Hex digest of everything that decides the rows, the library's version included."""
        from importlib.metadata import version

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        text = json.dumps([_VERSION, version("reasoning-gym"), fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def check_answer(self, completion: str, answer: str) -> bool:
        """Return whether the completion is exactly the expected answer. `ReasoningReward` accepts other correct
        answers."""
        return completion.strip() == answer

    def _entries(self, seed: int, size: int) -> list[dict[str, object]]:
        _require()
        import reasoning_gym

        try:
            return list(reasoning_gym.create_dataset(self.task, seed=seed, size=size, **self.options))
        except (ValueError, TypeError, AssertionError) as error:  # unknown task, unknown option, impossible value
            raise ConfigError(
                f"task={self.task!r} cannot be built by reasoning-gym: {error}", code="unknown_name", keys=("task",)
            ) from error

    def _row(self, entry: dict[str, object]) -> dict[str, object]:
        question = f"{entry['question']}\n{self.instruction}".strip()
        answer = str(entry["answer"])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "answer": answer, "kind": self.task, "entry": entry}


_CODE = re.compile(r"__|\b(exec|eval|compile|open|input|breakpoint|getattr|setattr|delattr|globals|locals|vars)\s*\(")
"""Syntax that goes beyond arithmetic. Some verifiers pass the answer to sympy, which evaluates it as Python."""


@dataclass(frozen=True, kw_only=True)
class ReasoningReward(Reward):
    """Score of the task's own verifier, 0 to 1. `entry` of the row names the task."""

    confined: ClassVar[bool] = True

    timeout: float | None = 10.0
    """Seconds for one score of reasoning-gym. null: no limit."""

    def check(self) -> None:
        _require()

    def warm_up(self) -> None:
        import reasoning_gym  # noqa: F401

        guard_sympy()
        guard_eval("reasoning_gym")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("entry",)

    def score(self, sample: RewardInput) -> float:
        self.warm_up()
        import reasoning_gym

        if _CODE.search(sample.completion):
            raise ValueError("the answer is code, which the task's verifier could run")
        entry = sample.column("entry")
        verify = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        return float(verify(answer=sample.completion.strip(), entry=entry))


def _require() -> None:
    require_package("reasoning_gym", "this task", install="'automodel-cli[rewards]'", keys=("task",))
