"""Prompts of a run that generates responses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automodel_cli.data.formats.examples import Messages
from automodel_cli.data.json_reader import Row
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.picture import Picture
from automodel_cli.data.preparation.packed_rows import length_histogram
from automodel_cli.data.storage.checksums import Checksum


@dataclass(frozen=True)
class Prompt:
    """One prompt. `number`: index in the dataset. `tokens`: ids up to the start of the response. `row`: the row that
    rewards read. `tools`: tool descriptions that the chat template renders. `pictures`: of each run of placeholders."""

    number: int
    tokens: list[int]
    messages: Messages
    row: Row
    origin: str
    tools: Messages | None = None
    pictures: tuple[Picture, ...] = ()


class PromptDataset:
    """Prompts of one or more sources. `BatchLoader` distributes them over ranks and steps like sequences."""

    def __init__(self, sources: Sequence[Sequence[Prompt]], mixture: Mixture):
        self.prompts = [prompt for source in sources for prompt in source]
        self.mixture = mixture
        self.first_rows = np.cumsum([0, *(len(source) for source in sources)])
        self.contents = [_content(source) for source in sources]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def row_lengths(self) -> np.ndarray:
        """Return 1 for each prompt: a `sampling_weight` is a share of the prompts."""
        return np.ones(len(self), np.int64)

    def collate(self, row_indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts with these indices."""
        return [self.prompts[int(row)] for row in row_indices]

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, label mask and bounds like `PackedDataset.tokens`. No token of a prompt has loss."""
        ids = np.array(self.prompts[row].tokens, np.int64)
        return ids, np.zeros(len(ids), np.uint8), np.array([0, len(ids)])

    def taught_stops(self) -> list[int]:
        """Return no token: a prompt teaches none."""
        return []

    def largest_id(self) -> tuple[int, str]:
        """Return the largest token id of all prompts, and the file and line of a prompt that holds it."""
        return max(((max(prompt.tokens, default=-1), prompt.origin) for prompt in self.prompts), default=(-1, ""))

    def units_per_row(self) -> tuple[str, float]:
        """See `PackedDataset.units_per_row`: a row is one prompt."""
        return "prompts", 1.0

    def statistics(self) -> list[dict[str, object]]:
        """See `PackedDataset.statistics`. Prompts are not packed and have no loss."""
        bounds = self.first_rows.tolist()
        parts = [self.prompts[begin:end] for begin, end in itertools.pairwise(bounds)]
        return [
            {"name": name, **length_histogram(np.array([len(prompt.tokens) for prompt in part], np.int64))}
            for part, (name, _) in zip(parts, self.contents, strict=True)
        ]

    def mean_context(self) -> float:
        """Mean prompt length in tokens, without the response."""
        return float(np.mean([len(prompt.tokens) for prompt in self.prompts]))

    def describe(self, row: int) -> str:
        """Origin of the prompt, for messages."""
        return self.prompts[row].origin if 0 <= row < len(self) else "(padding)"


def _content(prompts: Sequence[Prompt]) -> tuple[str, str]:
    """Return the files of the prompts, and a hash of the tokens and of the rows that rewards read."""
    digest = Checksum()
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.row], sort_keys=True, default=str).encode())
    names = dict.fromkeys(prompt.origin.rpartition(":")[0] for prompt in prompts)
    return ", ".join(names), digest.hexdigest()
