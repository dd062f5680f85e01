"""What a model without a language head gives: scores or embeddings, as its export states them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EmbeddingHead:
    """Embeddings of texts, as the export states them for sentence-transformers.

    Attributes:
        pooling: `last` token, or `mean` over tokens.
        query_prompt, passage_prompt: text before queries and passages.
        max_tokens: most tokens of a text.
    """

    pooling: str = "last"
    query_prompt: str = ""
    passage_prompt: str = ""
    max_tokens: int = 512


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
