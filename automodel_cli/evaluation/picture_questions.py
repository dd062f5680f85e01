"""Answers to questions with pictures, for generation tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.pictures.storage import PictureList
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.data.tokenized import pad_or_eos
from automodel_cli.models.hub.source import stop_ids
from automodel_cli.rollout.types import Completion
from automodel_cli.run.pictures.decoding import Asked, PictureDecoder

if TYPE_CHECKING:
    from automodel_cli.evaluation.eval_model import EvalModel


def answers_with_pictures(candidate: EvalModel, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Completion]:
    """Return greedy answers. Collective. Log-probs are 0, because no reward reads them."""
    support, recipe, tokenizer = candidate.pictures, candidate.recipe, candidate.tokenizer
    assert support is not None, "the model reads pictures"
    asked = []
    for number, prompt in enumerate(prompts):
        grids = tuple(support.processor.grid(picture.height, picture.width) for picture in prompt.pictures)
        table = PictureList(Path(f"question {number}"), prompt.pictures, grids)
        asked.append(Asked(np.array(prompt.tokens, np.int64), [(table, nth) for nth in range(len(grids))]))
    decoder = PictureDecoder(
        candidate.model.stages,
        candidate.mesh,
        support.reader(repeated=False),
        stops={tokenizer.eos_token_id, *stop_ids(recipe.model), *candidate.taught_stops},
        rows=recipe.train.microbatch_size,
        pad_id=pad_or_eos(tokenizer) or 0,
        multiple_of=recipe.data.pad_to_multiple_of,
    )
    found = []
    for tokens, stop in decoder.complete(asked, max_new_tokens):
        new = [*tokens, *([] if stop is None else [stop])]
        found.append(Completion(new, [0.0] * len(new), "length" if stop is None else "stop", 0))
    return found
