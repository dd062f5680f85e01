"""What a model with a value head scores, and how transformers names it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScoreHead:
    """Scores of a reward model or classifier, as the export states them.

    Attributes:
        labels: name of each output. Empty: one output without a name, as reward models have.
        problem: `problem_type` of the config.
        of_tokens: every token has scores, not only the last one.
        plain_text: texts have the tokens of `tokenizer(text)`. False: conversations, which end with an end token.
    """

    labels: tuple[str, ...] = ()
    problem: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    of_tokens: bool = False
    plain_text: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.labels) or 1
