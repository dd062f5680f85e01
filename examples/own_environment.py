"""An environment of your own: it asks again until the model has said something new, and rewards each new answer.

    automodel grpo llm -c quickstart_grpo \
        rollout.environment='{_target_: own_environment.SayMore, max_turns: 3}' --trust-package own_environment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.types import Message


@dataclass(frozen=True, kw_only=True)
class SayMore(Environment):
    """`question` follows on every answer that was not given before; a repeated one ends the episode."""

    question: str = "And?"

    def step(self, messages: Sequence[Message], row: Mapping[str, Any], state: Any) -> Turn:
        said: tuple[str, ...] = state or ()
        answer = str(messages[-1]["content"])
        if answer in said:
            return Turn()
        again = {"role": "user", "content": self.question}
        return Turn((again,), reward=1.0, done=False, state=(*said, answer))
