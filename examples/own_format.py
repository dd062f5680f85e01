"""Formats of your own: threads of a forum, a question with several scored answers, as no format of ours reads them.

    automodel finetune llm -c own_format.yaml --trust-package own_format         # trains on the best answer
    automodel data inspect -c own_format.yaml --trust-package own_format         # shows what it makes of the rows
    automodel dpo llm -c quickstart_dpo '~data.generator' data.path=threads.jsonl \
        'data.format={_target_: own_format.BestAndWorst}' --trust-package own_format
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from automodel_cli.data.formats.examples import Document, Pair
from automodel_cli.data.formats.row_accessor import Fields
from automodel_cli.data.row_errors import RowError


@dataclass(frozen=True)
class BestAnswer:
    """A question with its best answer (sft), or the question as a prompt (grpo). Answers below `least` do not count."""

    least: int = 0

    fields: ClassVar[tuple[str, ...]] = ("title", "body", "answers", "system")
    makes: ClassVar[str] = "conversations"

    def read(self, row: Fields) -> Document:
        best = _answers(row, self.least)[0]
        return row.conversation([{"role": "user", "content": _question(row)}, {"role": "assistant", "content": best}])


@dataclass(frozen=True)
class BestAndWorst:
    """The same threads for dpo: the best answer against the worst."""

    fields: ClassVar[tuple[str, ...]] = ("title", "body", "answers", "system")
    makes: ClassVar[str] = "pairs"

    def read(self, row: Fields) -> Pair:
        best, *_, worst = _answers(row, least=-1000)
        return row.pair(_question(row), best, worst)


def _question(row: Fields) -> str:
    return "\n".join(filter(None, (row.text("title"), row.optional_text("body"))))


def _answers(row: Fields, least: int) -> list[str]:
    """The texts of the answers, the best first."""
    answers: list[dict[str, Any]] = row["answers"]
    ranked = sorted((a for a in answers if a["score"] >= least), key=lambda answer: -answer["score"])
    if not ranked:
        raise RowError("no_answer", f"no answer has a score of {least} or more", fix="data.on_invalid_row=drop")
    return [str(answer["text"]) for answer in ranked]
