"""Greedy answers to questions with pictures, through `Stages.forward`.

No second copy of the model is needed, and every layout works. Each new token costs one forward of the question, as no
keys are cached. That is cheap for short answers.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.data.pictures.reader import PictureReader, Shown
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.training.metrics.peak_memory import max_over_ranks
from automodel_cli.training.stages import Stages


@dataclass(frozen=True)
class Asked:
    """Tokens of a question, and its pictures in the order of their placeholders."""

    prompt: np.ndarray
    pictures: Sequence[Shown]


class PictureDecoder:
    """Decodes greedily on the ranks of a model."""

    def __init__(
        self,
        stages: Stages,
        mesh: Mesh,
        reader: PictureReader,
        *,
        stops: Collection[int | None],
        rows: int,
        pad_id: int,
        multiple_of: int,
    ):
        """`rows`: questions of a forward. `multiple_of`: row lengths are multiples of it."""
        self._stages, self._mesh, self._reader = stages, mesh, reader
        self._stops, self._rows, self._pad_id, self._multiple_of = stops, rows, pad_id, multiple_of

    def complete(self, questions: Sequence[Asked], num_new: int) -> list[tuple[list[int], int | None]]:
        """Return the new tokens of each question without the stop token, and the stop token, None if there was none.

        Collective. Ranks of one data-parallel group may ask different questions, and different numbers of them.
        """
        num_calls = int(max_over_ranks(-(-len(questions) // self._rows), self._mesh.device))
        of_calls = [questions[self._rows * call :][: self._rows] for call in range(num_calls)]
        return [answer for of_call in of_calls for answer in self._of_call(of_call, num_new)]

    def _of_call(self, questions: Sequence[Asked], num_new: int) -> list[tuple[list[int], int | None]]:
        batch = self._batch(questions, num_new)
        tokens: list[list[int]] = [[] for _ in questions]
        stopped: list[int | None] = [None] * len(questions)
        for nth in range(num_new):
            for number, token in enumerate(self._next(batch, questions, nth).tolist()):
                if stopped[number] is None and token in self._stops:
                    stopped[number] = token
                elif stopped[number] is None:
                    tokens[number].append(token)
                batch.input_ids_BT[number, len(questions[number].prompt) + nth] = token
            if not max_over_ranks(float(None in stopped), self._mesh.device):
                break
        return list(zip(tokens, stopped, strict=True))

    def _next(self, batch: Batch, questions: Sequence[Asked], nth: int) -> Tensor:
        """Return the likeliest token after the prompt and `nth` new tokens of each question, int64 `[questions]`.

        Image tokens are excluded, because no picture belongs to them.
        """
        placeholder = self._reader.processor.placeholder
        places = torch.tensor([len(question.prompt) + nth - 1 for question in questions], dtype=torch.int64)
        labels_BT = torch.full_like(batch.input_ids_BT, IGNORE_INDEX)
        labels_BT[torch.arange(len(questions)), places] = 0  # any label: the head then reads this position
        asked = replace(batch, labels_BT=labels_BT).to(self._mesh.device)

        def likeliest(output: HeadOutput, batch: Batch) -> Tensor:
            assert output.topk_ids_BTK is not None
            first_N, second_N = output.topk_ids_BTK[torch.arange(len(questions)), places].unbind(1)
            return torch.where(first_N == placeholder, second_N, first_N)

        return self._stages.forward([asked], likeliest, HeadRequest(topk=2))[0].cpu()

    def _batch(self, questions: Sequence[Asked], num_new: int) -> Batch:
        """Return one row per question with room for `num_new` tokens, and empty rows.

        The tokens of the answer are padding until they are generated. They do not change the tokens before them,
        because attention is causal.
        """
        size, length = self._rows, max((len(question.prompt) for question in questions), default=1) + num_new
        length = -(-length // self._multiple_of) * self._multiple_of
        ids_BT = np.full((size, length), self._pad_id, np.int64)
        bounds: list[int] = [0]
        shown: list[Sequence[Shown]] = []
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
        return self._reader.with_pixels(batch, shown)  # one read for all tokens
