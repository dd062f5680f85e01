"""Answers to held-out rows with pictures before and after training, for the report.

Greedy decoding runs through `Stages.forward`, so it needs no second copy of the model and works under every layout.
Each new token costs one forward of a few short rows, which is cheap for a handful of rows.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.data.pictures.content import rgb
from automodel_cli.data.pictures.storage import PictureTable
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.models.hub.source import stop_ids
from automodel_cli.run.heldout_accuracy import Accuracy, Answer

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer

_NUM_ROWS, _NUM_SCANNED = 6, 200
_MOST_NEW, _MORE_THAN_EXPECTED = 48, 8
_THUMBNAIL = 160  # pixels of the longer side


@dataclass(frozen=True)
class _Question:
    """A held-out document: tokens before its first answer, the answer, and its pictures."""

    prompt: np.ndarray
    answer: np.ndarray
    pictures: list[tuple[PictureTable, int]]


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

    def _text(self, ids: Any) -> str:
        return str(self._session.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _prompt_text(self, ids: np.ndarray) -> str:
        placeholder = self._session.data.validation.pictures.processor.placeholder
        return self._text(ids[ids != placeholder])

    def _completions(self) -> list[list[int]]:
        """Return the new tokens of every question without the stop token."""
        session = self._session
        stops = {session.tokenizer.eos_token_id, *stop_ids(session.recipe.model), *session.data.train.taught_stops()}
        size, num_new = session.recipe.train.microbatch_size, _num_new(self._questions)
        batches = [
            _batch(self._questions[first : first + size], session.data.validation, size, num_new)
            for first in range(0, len(self._questions), size)
        ]
        found: list[list[int]] = [[] for _ in self._questions]
        is_open = [True] * len(found)
        for nth in range(num_new):
            ids = [
                token
                for number, batch in enumerate(batches)
                for token in self._next(batch, self._questions[number * size :][:size], nth).tolist()
            ]
            for number, question in enumerate(self._questions):
                is_open[number] &= ids[number] not in stops
                if is_open[number]:
                    found[number].append(ids[number])
                batches[number // size].input_ids_BT[number % size, len(question.prompt) + nth] = ids[number]
            if not any(is_open):
                break
        return found

    def _next(self, batch: Batch, questions: list[_Question], nth: int) -> Tensor:
        """Return the likeliest token after the prompt and `nth` new tokens of each question, int64 `[questions]`.

        Image tokens are excluded, because no picture belongs to them.
        """
        placeholder = self._session.data.validation.pictures.processor.placeholder
        places = torch.tensor([len(question.prompt) + nth - 1 for question in questions])
        labels_BT = torch.full_like(batch.input_ids_BT, IGNORE_INDEX)
        labels_BT[torch.arange(len(questions)), places] = 0  # any label: the head then reads this position
        asked = replace(batch, labels_BT=labels_BT).to(self._session.mesh.device)

        def likeliest(output: HeadOutput, batch: Batch) -> Tensor:
            assert output.topk_ids_BTK is not None
            first_N, second_N = output.topk_ids_BTK[torch.arange(len(questions)), places].unbind(1)
            return torch.where(first_N == placeholder, second_N, first_N)

        return self._session.model.stages.forward([asked], likeliest, HeadRequest(topk=2))[0].cpu()


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
    pictures: list[tuple[PictureTable, int]],
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
    return _Question(ids[:first], ids[first : last + 1], pictures[:num_shown]) if num_shown else None


def _batch(questions: list[_Question], rows: PackedDataset, size: int, num_new: int) -> Batch:
    """Return one row per question with room for `num_new` tokens, and empty rows up to `size`.

    The tokens of the answer are padding until they are generated. They do not change the tokens before them, because
    attention is causal.
    """
    length = max(len(question.prompt) for question in questions) + num_new
    length = -(-length // rows.pad_to_multiple_of) * rows.pad_to_multiple_of
    ids_BT = np.full((size, length), rows.pad_id, np.int64)
    bounds, shown = [0], []
    for number in range(size):
        question = questions[number] if number < len(questions) else None
        if question is not None:
            stop = len(question.prompt) + num_new
            ids_BT[number, : len(question.prompt)] = question.prompt
            shown.append(question.pictures)
            if stop < length:
                bounds.append(number * length + stop)
        if question is None or stop < length:
            shown.append([])
        bounds.append((number + 1) * length)
    lengths = np.diff(bounds)
    positions = np.arange(size * length) - np.repeat(bounds[:-1], lengths)
    ids = torch.from_numpy(ids_BT)
    batch = Batch(
        input_ids_BT=ids,
        labels_BT=torch.full_like(ids, IGNORE_INDEX),
        position_ids_BT=torch.from_numpy(positions.reshape(size, length)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        row_ids_B=torch.full((size,), -1),
    )
    assert rows.pictures is not None, "a recipe of kind vlm reads pictures"
    batch = rows.pictures.with_pictures(batch, shown)
    assert batch.pictures is not None
    held = dict(batch.pictures.inputs.items())  # one read for all tokens
    return replace(batch, pictures=replace(batch.pictures, inputs=held))


def _thumbnail(content: bytes) -> str:
    """Return a small copy of a picture as a `data:` URL."""
    image = rgb(content)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
