"""The microbatches of a dry run: rows as long as the config's, documents as long as its data's, where that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.dryrun.request import DEFAULT_DOCUMENT
from automodel_cli.dryrun.torch_compat import unset_fake_temporarily
from automodel_cli.models.source import hf_config


@dataclass(frozen=True)
class Columns:
    """One microbatch on the host: integers with values, and columns without (meta tensors)."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    row_ids: Tensor
    integers: dict[str, Tensor] = field(default_factory=dict)
    unknown: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Documents:
    """Lengths in the order in which rows take them, again and again, and where they come from."""

    lengths: tuple[int, ...]
    source: str


def document_lengths(recipe: Any, asked: int | None, *, read: bool = False) -> Documents:
    """`asked` tokens each; else those of the recipe's data, which is prepared for it with `read`, or if it is made in
    code; else a stated default.

    Rows that are not packed hold one document, as long as the row.
    """
    whole = recipe.data.seq_len
    if asked is not None:
        return Documents((min(asked, whole),), f"{min(asked, whole)} tokens each, as asked")
    if (read or recipe.data.task is not None) and recipe.kind != "grpo":
        return _prepared_lengths(recipe)
    if recipe.data.packing == "none":
        return Documents((whole,), f"one of {whole} tokens a row (the longest there can be)")
    length = min(DEFAULT_DOCUMENT, whole)
    return Documents((length,), f"{length} tokens each (assumed: the data was not read; --document N)")


def _prepared_lengths(recipe: Any) -> Documents:
    """Of the first rows of the data as a run would read it."""
    from automodel_cli.models.tokenizer import load_tokenizer

    found = recipe.prepared(load_tokenizer(recipe.model)).train
    batches = [found.collate([i]) for i in range(min(64, len(found)))]
    lengths = tuple(int(n) for batch in batches for n in batch.cu_seqlens.diff() if n > 0)
    return Documents(lengths, f"{sum(lengths) / len(lengths):.0f} tokens on average, as in the prepared data")


def microbatches(recipe: Any, documents: Documents, number: int) -> list[Columns]:
    """Rows filled with documents to the last token. Every token but a document's last is a label, as it is where
    `mask=all`: nothing needs more memory."""
    rows, tokens = recipe.train.microbatch_size, recipe.data.seq_len
    lengths = cycle(documents.lengths)
    names = frozenset(getattr(recipe.objective, "columns", ()))
    compared = _tokens_of_a_teacher(recipe) if any(name.endswith("_BTN") for name in names) else 0
    return [_microbatch(index, rows, tokens, lengths, names, compared) for index in range(number)]


def _tokens_of_a_teacher(recipe: Any) -> int:
    """N of columns `[B, T, N]`: the likeliest, or the whole vocabulary, which is the student's."""
    whole: int = hf_config(recipe.model).get_text_config().vocab_size
    return recipe.objective.top_k or whole


def _microbatch(
    index: int, rows: int, tokens: int, lengths: Iterator[int], names: frozenset[str], compared: int
) -> Columns:
    bounds = [0]
    for row in range(rows):
        end = (row + 1) * tokens
        while bounds[-1] < end:
            bounds.append(min(bounds[-1] + next(lengths), end))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    sizes = cu_seqlens.diff().tolist()
    ids = torch.arange(rows * tokens).remainder(1000).view(rows, tokens)
    labels = ids.clone()
    labels.view(-1)[cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    positions = torch.cat([torch.arange(n) for n in sizes]).view(rows, tokens)
    pairs = max(1, len(sizes) // 2)
    known = {
        "pairs_P2": torch.arange(2 * pairs).view(-1, 2) % len(sizes),
        "desirable_S": torch.arange(len(sizes)) % 2,
    }
    letters = {"B": rows, "T": tokens, "S": len(sizes), "P": pairs, "N": compared}
    return Columns(
        ids,
        labels,
        positions,
        cu_seqlens,
        torch.full((rows,), index),
        {name: column for name, column in known.items() if name in names},
        {name: _column(name, letters) for name in names - known.keys()},
    )


def _column(name: str, letters: dict[str, int]) -> Tensor:
    """One without values, of the shape that the end of its name says: `teacher_ids_BTN` is rows x tokens x N ids."""
    shape = [letters[x] if x in letters else int(x) for x in name.rpartition("_")[2]]
    return torch.empty(shape, dtype=torch.int64 if "_ids_" in name else torch.float32, device="meta")


def as_batches(columns: Sequence[Columns], keep: Any) -> list[Batch]:
    """The same as batches of fake host tensors, under the fake mode; `keep(fake, real)` remembers the integers."""

    def fake(real: Tensor) -> Tensor:
        tensor = torch.empty(real.shape, dtype=real.dtype)
        keep(tensor, real)
        return tensor

    def longest(real: Tensor) -> int:
        with unset_fake_temporarily():
            return int(real.diff().max())

    return [
        Batch(
            fake(one.input_ids),
            fake(one.labels),
            fake(one.positions),
            fake(one.cu_seqlens),
            longest(one.cu_seqlens),
            fake(one.row_ids),
            {name: fake(real) for name, real in one.integers.items()}
            | {name: torch.empty(like.shape, dtype=like.dtype) for name, like in one.unknown.items()},
        )
        for one in columns
    ]
