"""Answers to held-out rows with pictures before and after training, for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.pictures.content import rgb
from automodel_cli.data.pictures.reader import Shown
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.models.hub.source import stop_ids
from automodel_cli.run.heldout_accuracy import Accuracy, Answer
from automodel_cli.run.pictures.decoding import Asked, PictureDecoder

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer

_NUM_ROWS, _NUM_SCANNED = 6, 200
_MOST_NEW, _MORE_THAN_EXPECTED = 48, 8
_THUMBNAIL = 160  # pixels of the longer side


@dataclass(frozen=True)
class _Question(Asked):
    """A held-out document: tokens before its first answer, its pictures, and the answer."""

    answer: np.ndarray


class PictureAnswers:
    """Answers of the model to the same held-out questions, by `before` and `after`."""

    def __init__(self, session: Trainer):
        self._session = session
        self.accuracy: dict[str, Accuracy] = {}
        rows = session.data.validation
        self._questions = [] if rows is None or rows.pictures is None else _chosen(rows)

    def ask(self, when: str) -> None:
        """Answer all questions. No effect without validation rows with pictures. Collective."""
        if not self._questions:
            return
        session = self._session
        with session.meter.pause():
            completions = self._completions()
        if not session.is_main:
            return
        answers = []
        for question, ids in zip(self._questions, completions, strict=True):
            text, expected = self._text(ids), self._text(question.answer)
            shown = tuple(_thumbnail(table.content(number)) for table, number in question.pictures)
            answers.append(Answer(self._prompt_text(question.prompt), text, expected, text == expected, "", shown))
        self.accuracy[when] = Accuracy(tuple(answers), is_sample=True)

    def _text(self, ids: Iterable[int]) -> str:
        return str(self._session.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _prompt_text(self, ids: np.ndarray) -> str:
        placeholder = self._session.data.validation.pictures.processor.placeholder
        return self._text(ids[ids != placeholder])

    def _completions(self) -> list[list[int]]:
        """Return the new tokens of every question without the stop token."""
        session = self._session
        rows = session.data.validation
        assert rows.pictures is not None, "there are questions"
        stops = {session.tokenizer.eos_token_id, *stop_ids(session.recipe.model), *session.data.train.taught_stops()}
        decoder = PictureDecoder(
            session.model.stages,
            session.mesh,
            rows.pictures,
            stops=stops,
            rows=session.recipe.train.microbatch_size,
            pad_id=rows.pad_id,
            multiple_of=rows.pad_to_multiple_of,
        )
        return [tokens for tokens, _ in decoder.complete(self._questions, _num_new(self._questions))]


def _num_new(questions: list[_Question]) -> int:
    return min(_MOST_NEW, max(len(question.answer) for question in questions) + _MORE_THAN_EXPECTED)


def _chosen(rows: PackedDataset) -> list[_Question]:
    """Return the first documents with pictures before their first answer, each with other pictures."""
    chosen: list[_Question] = []
    seen: set[tuple[int, ...]] = set()
    assert rows.pictures is not None, "a recipe of kind vlm reads pictures"
    placeholder = rows.pictures.processor.placeholder
    for row in range(min(len(rows), _NUM_SCANNED)):
        ids, mask, bounds = rows.tokens(row)
        shown = rows.shown(row, len(bounds) - 1)
        for start, stop, pictures in zip(bounds[:-1], bounds[1:], shown, strict=True):
            lengths = [rows.pictures.num_placeholders(table.size(number)) for table, number in pictures]
            question = _question(ids[start:stop], mask[start:stop], pictures, lengths, placeholder)
            key = tuple(number for _, number in pictures)
            if question is not None and key not in seen:
                seen.add(key)
                chosen.append(question)
            if len(chosen) == _NUM_ROWS:
                return chosen
    return chosen


def _question(
    ids: np.ndarray,
    mask: np.ndarray,
    pictures: Sequence[Shown],
    lengths: list[int],
    placeholder: int,
) -> _Question | None:
    """Split a document at its first trained token, None if all its pictures come later.

    Args:
        mask: of the next token.
        lengths: number of image tokens of each picture. Pictures may follow each other without a token between them.
    """
    labels = np.flatnonzero(mask)
    if not len(labels):
        return None
    first = int(labels[0]) + 1
    last = first + int(np.argmax(np.append(mask[first:] == 0, True))) if first < len(mask) else first
    num_shown = int(np.searchsorted(np.cumsum(lengths), np.sum(ids[:first] == placeholder), side="right"))
    return _Question(ids[:first], pictures[:num_shown], ids[first : last + 1]) if num_shown else None


def _thumbnail(content: bytes) -> str:
    """Return a small copy of a picture as a `data:` URL."""
    image = rgb(content)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
