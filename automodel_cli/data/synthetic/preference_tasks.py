"""Preference pairs made in code: the right answer to a question of `ChatTasks` against one with a slip in it.
Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from automodel_cli.data.json_reader import Row
from automodel_cli.data.synthetic.chat_tasks import ChatTasks, Split

_VERSION = 1
"""Part of every cache key. Raise it when the same node would produce other rows."""
_DIGITS, _LETTERS = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class PreferenceTasks:
    """Preference pairs for the questions of `tasks`, in the same disjoint splits."""

    tasks: ChatTasks = field(default_factory=ChatTasks)
    """Questions that the pairs answer."""

    def rows(self, split: Split) -> Iterator[Row]:
        """Return dicts with `prompt` (one user message), `chosen` and `rejected`. Equal nodes return equal rows."""
        rng = random.Random(f"slips {self.tasks.seed} {split}")
        for row in self.tasks.rows(split):
            yield {"prompt": row["messages"][:1], "chosen": row["answer"], "rejected": _with_a_slip(rng, row["answer"])}

    def cache_key(self) -> str:
        """Hex digest of everything that decides the rows."""
        text = json.dumps({"class": type(self).__name__, "version": _VERSION, "tasks": self.tasks.cache_key()})
        return hashlib.sha256(text.encode()).hexdigest()


def _with_a_slip(rng: random.Random, answer: str) -> str:
    """The answer with one character replaced by another of its kind, or with two unequal neighbours swapped."""
    swaps = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
    if swaps and rng.random() < 0.5:
        at = rng.choice(swaps)
        return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
    at = rng.choice([i for i, character in enumerate(answer) if character.isalnum()])
    alphabet = _DIGITS if answer[at].isdigit() else _LETTERS
    return answer[:at] + rng.choice([c for c in alphabet if c != answer[at]]) + answer[at + 1 :]
