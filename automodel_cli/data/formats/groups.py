"""Rows for embeddings: a query with a passage that answers it, and perhaps passages that do not. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from automodel_cli.data.formats.base import FirstRows, Makes
from automodel_cli.data.formats.examples import TextGroup
from automodel_cli.data.formats.row_accessor import Fields
from automodel_cli.data.row_errors import RowError, is_finite_number


@dataclass(frozen=True)
class Retrieval:
    """A query, its passage, hard negatives (a text or a list), and the score of a scored pair."""

    name: ClassVar[str] = "retrieval"
    fields: ClassVar[tuple[str, ...]] = ("query", "positive", "negatives", "negative", "score")
    makes: ClassVar[Makes] = "groups"

    def detects(self, sample: FirstRows) -> bool:
        return {"query", "positive"} <= sample.has

    def read(self, row: Fields) -> TextGroup:
        given = row.get("negatives") or row.get("negative") or []
        negatives = [given] if isinstance(given, str) else given
        if not isinstance(negatives, list) or not all(isinstance(text, str) and text.strip() for text in negatives):
            raise RowError("not_text", f"the negatives must be a text or a list of texts, not {given!r:.80}")
        score = row.get("score")
        if score is not None and not is_finite_number(score):
            raise RowError("bad_label", f"{row.column('score')} is {score!r}, but must be a finite number")
        return TextGroup(row.text("query"), row.text("positive"), tuple(negatives), score)
