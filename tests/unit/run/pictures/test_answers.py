"""Questions with pictures of held-out documents."""

from __future__ import annotations

import numpy as np

from automodel_cli.run.pictures.answers import _question

IMAGE = 9


def test_pictures_without_a_token_between_them_are_all_shown():
    ids = np.array([1, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 2, 3, 4, IMAGE, 5])
    mask = np.array([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])  # the answer is token 8
    question = _question(ids, mask, ["a", "b", "later"], [3, 2, 1], IMAGE)
    assert question is not None and question.pictures == ["a", "b"]
    assert question.prompt.tolist() == ids[:8].tolist() and question.answer.tolist() == [4]
    assert _question(ids[6:], mask[6:], ["later"], [1], IMAGE) is None
