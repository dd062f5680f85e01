"""Select samples of a run from rollouts.jsonl by step, reward and prompt. Read-only."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word

Sample = dict[str, Any]
"""A line of rollouts.jsonl: the step, the reward, the messages of the prompt, the completion, ..."""
Order = Literal["newest", "best", "worst"]
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class RolloutFilter:
    """Filter of samples. `steps` is inclusive at both ends, None for an open end. `least` and `most` bound the reward.
    `prompt` and `completion` are case-insensitive parts of texts. `trained` excludes samples without a gradient."""

    steps: tuple[int | None, int | None] = (None, None)
    least: float | None = None
    most: float | None = None
    prompt: str = ""
    completion: str = ""
    trained: bool = False

    def has(self, row: Sample) -> bool:
        """Return whether a sample passes the filter."""
        first, last = self.steps
        return (
            (first is None or row["step"] >= first)
            and (last is None or row["step"] <= last)
            and (self.least is None or row["reward"] >= self.least)
            and (self.most is None or row["reward"] <= self.most)
            and (not self.trained or row["trained"])
            and self.prompt.casefold() in "\n".join(str(m["content"]) for m in row["prompt"]).casefold()
            and self.completion.casefold() in conversation_text(row["completion"], row.get("turns")).casefold()
        )


def conversation_text(completion: str, turns: Sequence[Sample] | None) -> str:
    """Return the completion. For several turns: all of them, with the environment's replies in brackets."""
    if not turns:
        return completion
    turns_text = [(message["role"], str(message["content"])) for message in turns]
    return "\n".join(text if role == "assistant" else f"[{role}: {text}]" for role, text in turns_text)


def select(folder: Path, wanted: RolloutFilter, count: int, order: Order) -> tuple[list[Sample], int]:
    """Return up to `count` samples in order, and their total number. Raises ConfigError if the run has no samples."""
    path = folder / "rollouts.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no rollouts.jsonl, which only GRPO and PPO runs write",
            code="wrong_recipe",
            fix=f"automodel runs show {word(folder)}",
        )
    total, numbered = 0, enumerate(row for row in _rows(path) if wanted.has(row))

    def counted() -> Iterator[tuple[int, Sample]]:
        nonlocal total
        for number, row in numbered:
            total += 1
            yield number, row

    keys = {
        "newest": lambda pair: pair[0],
        "best": lambda pair: (pair[1]["reward"], pair[0]),
        "worst": lambda pair: (-pair[1]["reward"], pair[0]),
    }
    chosen = heapq.nlargest(count, counted(), key=keys[order])
    return [row for _, row in chosen], total


def newest(folder: Path, count: int) -> list[Sample]:
    """Return up to `count` newest samples of a run, newest first, from the end of rollouts.jsonl."""
    path = folder / "rollouts.jsonl"
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(-min(_TAIL_BYTES, path.stat().st_size), os.SEEK_END)
        lines = file.read().split(b"\n")[:-1]  # an active run may be writing its last line
    rows = []
    for line in reversed(lines[-count:]):
        try:
            rows.append(json.loads(line))
        except ValueError:  # the part of a line at which the tail begins
            break
    return rows


def _rows(path: Path) -> Iterator[Sample]:
    """An active run may be writing its last line."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
