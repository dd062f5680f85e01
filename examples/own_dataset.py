"""A dataset of your own, made in code: the model learns to spell words backwards.

    automodel finetune llm -c quickstart \
        '~data.generator' 'data.generator={_target_: own_dataset.Backwards, number: 200}' --trust-package own_dataset
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Backwards:
    """`number` words for training, a tenth of it to measure with. `check_answer` and the rows' `answer` give runs their
    accuracy; without them there is none."""

    number: int = 100
    seed: int = 0

    def rows(self, split: Literal["train", "validation"]) -> Iterator[dict[str, Any]]:
        draw = random.Random(f"{split} {self.seed}")
        for _ in range(self.number if split == "train" else self.number // 10):
            word = "".join(draw.choices("abcdefgh", k=draw.randint(2, 4)))
            messages = [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
            yield {"messages": messages, "answer": word[::-1]}

    def cache_key(self) -> str:
        return f"backwards {self.number} {self.seed}"

    def check_answer(self, completion: str, answer: str) -> bool:
        return completion.strip() == answer
