"""Tokens of queries and passages: those of `tokenizer(prompt + text)`, as sentence-transformers makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.formats.examples import Example, TextGroup
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.tokenized import Encoded, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GroupEncoder:
    """Encoder of groups. Picklable, for worker processes. A group is one item, which packing keeps together."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: GroupSpec, *, add_special_tokens: bool):
        self._tokenizer, self._spec, self._add_special_tokens = tokenizer, spec, add_special_tokens

    def encode(self, read: Sequence[Example | RowError]) -> list[Encoded | RowError]:
        """Return one result per row, in order."""
        return [attempt(self._encode, row) for row in read]

    def _encode(self, row: Example | RowError) -> Encoded:
        match row:
            case TextGroup():
                return self._group(row)
            case RowError():
                raise row
        raise AssertionError(f"{type(row).__name__} is no group")

    def _group(self, row: TextGroup) -> Encoded:
        spec = self._spec
        if spec.scored and (row.score is None or row.negatives):
            missing = "no score" if row.score is None else "negatives"
            raise RowError("missing_column", f"the row has {missing}, but the objective trains on scored pairs")
        if row.score is not None and not spec.scored:
            raise RowError(
                "unread_column",
                "the row has a score, which this objective does not read",
                fix="objective=cosine_score, or data.column_mapping='{score: \"\"}'",
            )
        passages = [spec.passage_prompt + text for text in (row.positive, *row.negatives)]
        texts = [spec.query_prompt + row.query, *passages]
        found = encode_texts(self._tokenizer, texts, add_special_tokens=self._add_special_tokens)
        parts = [ids[: spec.max_tokens] for ids in found]
        if not all(map(len, parts)):
            raise RowError("empty", "a text of the row has no token")
        ids = np.concatenate(parts)
        lengths = tuple(map(len, parts))
        return Encoded(ids, np.ones(len(ids), np.uint8), margin=row.score or 0.0, parts=lengths)
