"""Print rows as the model sees them: decoded tokens, trained tokens, and ends of documents and turns.

With color, trained tokens are green, other tokens dim and special tokens boxed. Without color, `{trained}` and
`[masked]` mark them. Special tokens are printed as their text in both cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from automodel_cli.config.errors import DataError
from automodel_cli.config.plain_text import visible
from automodel_cli.data.formats.base import PREFERENCES
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.data.preparation.pipeline import PreparedData
from automodel_cli.data.preparation.prompts import PreparedPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED, MASKED, BOXED = "green", "dim", "reverse"
MOST_REPEATED = 16
"""Longer runs of one special token are printed as the token and its number: a picture has hundreds."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one document that are alike: all trained or all not, and one special token or none."""

    text: str
    trained: bool
    special: bool


def stretches(ids: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[Stretch]:
    """Decode a document in the longest pieces that are alike: single tokens may be parts of a character.

    Control characters are written out: a terminal would obey them.
    """
    special = np.isin(ids, [*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder])
    changes = np.flatnonzero((np.diff(trained.astype(np.int8)) != 0) | special[1:] | special[:-1]) + 1
    bounds = [0, *changes.tolist(), len(ids)]
    for a, b in itertools.pairwise(bounds):
        text = _decoded(tokenizer, ids[a:b].tolist())
        yield Stretch(visible(text), bool(trained[a]), bool(special[a]))


def _shortened(pieces: Iterator[Stretch]) -> Iterator[Stretch]:
    for piece, run in itertools.groupby(pieces):
        same = list(run)
        if piece.special and len(same) > MOST_REPEATED:
            yield replace(piece, text=f"{piece.text} (x {len(same):,}) ")
        else:
            yield from same


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def trained_tokens(label_mask: np.ndarray) -> np.ndarray:
    """Per token whether it is learned, from the mask of labels: a label is the next token."""
    return np.concatenate([[0], label_mask[:-1]]).astype(np.uint8)


def render_document(
    ids: np.ndarray, label_mask: np.ndarray, tokenizer: PreTrainedTokenizerBase, *, colour: bool
) -> Text:
    """One document as text with styles, or with `{}` and `[]` around trained and masked stretches."""
    out = Text()
    pieces = list(_shortened(stretches(ids, trained_tokens(label_mask), tokenizer)))
    for i, piece in enumerate(pieces):
        if colour:
            style = TRAINED if piece.trained else MASKED
            out.append(piece.text, f"{BOXED} {style}" if piece.special else style)
            continue
        opens = i == 0 or pieces[i - 1].trained != piece.trained
        closes = i + 1 == len(pieces) or pieces[i + 1].trained != piece.trained
        left, right = ("{", "}") if piece.trained else ("[", "]")
        out.append((left if opens else "") + piece.text + (right if closes else ""))
    return out


def print_row(console: Console, dataset: PackedDataset, tokenizer: PreTrainedTokenizerBase, row: int) -> None:
    """One packed row with a rule before each of its documents."""
    ids, label_mask, bounds = dataset.tokens(row)
    colour = console.color_system is not None
    heading = f"row {row} of {len(dataset):,}: {len(ids):,} tokens, {dataset.num_label_tokens(row):,} trained"
    console.print(Text(heading, "bold" if colour else ""))
    names = {1: "chosen", 0: "rejected"} if dataset.kind == "pairs" else {1: "good", 0: "bad", -1: "another's answer"}
    roles = [f" ({names[role]})" for role in dataset.roles(row).tolist()] if dataset.kind in PREFERENCES else []
    if dataset.kind == "groups":
        roles = [f" ({('query', 'passage', 'negative')[role]})" for role in dataset.roles(row).tolist()]
    if dataset.kind == "labeled":
        roles = [f" ({text})" for text in _target_texts(dataset, row, bounds)]
    for number, (name, line) in enumerate(dataset.documents(row)):
        a, b = int(bounds[number]), int(bounds[number + 1])
        count = int(label_mask[a:b].sum())
        role = roles[number] if roles else ""
        head = (
            f"── document {number + 1}{role}: {name}:{line}, {b - a:,} tokens, {count:,} trained, "
            f"positions 0-{b - a - 1} ──"
        )
        console.print(Text(head, "cyan" if colour else ""))
        console.print(render_document(ids[a:b], label_mask[a:b], tokenizer, colour=colour), soft_wrap=True)
    console.print()


def _target_texts(dataset: PackedDataset, row: int, bounds: np.ndarray) -> list[str]:
    """Return the labels of each document of a row as text."""
    names, problem = dataset.labels["names"], dataset.labels["problem"]
    if dataset.labels["of_tokens"]:
        classes = [dataset.classes(row)[a:b] for a, b in itertools.pairwise(bounds.tolist())]
        return [" ".join(names[i] if i >= 0 else "-" for i in of_document.tolist()) for of_document in classes]
    targets = dataset.targets(row)
    if problem == "single_label_classification":
        return [names[int(target)] for target in targets[:, 0]]
    if problem == "regression":
        return [", ".join(f"{name} {value:g}" for name, value in zip(names, t, strict=True)) for t in targets]
    return [", ".join(name for name, value in zip(names, t, strict=True) if value) or "no label" for t in targets]


def choose_shown_rows(dataset: PackedDataset, number: int, row: int | None, worst: bool) -> Sequence[int]:
    """Return the rows to print: the requested one, those with the lowest trained fraction, or the first."""
    if row is not None:
        if not 0 <= row < len(dataset):
            raise DataError(
                f"--row {row} must be between 0 and {len(dataset) - 1}",
                code="out_of_range",
                keys=("--row",),
                fix=f"--row {len(dataset) - 1}",
            )
        return [row]
    if not worst:
        return range(min(number, len(dataset)))
    lengths = np.concatenate([np.diff(store.offsets[store.row_offsets]) for store in dataset.stores])
    labels = np.concatenate([store.num_label_tokens for store in dataset.stores])
    result: Sequence[int] = np.argsort(labels / lengths, kind="stable")[:number].tolist()
    return result


def show_rows(
    prepared: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int = 3,
    row: int | None = None,
    worst: bool = False,
    console: Console | None = None,
) -> None:
    """Print rows of the training data, then the totals. `row` selects one, `worst` those with the fewest trained
    tokens.

    Raises DataError for a row that does not exist.
    """
    console = console or Console(highlight=False)
    for index in choose_shown_rows(prepared.train, rows, row, worst):
        print_row(console, prepared.train, tokenizer, index)
    legend = "green: trained, dim: masked, boxed: special token" if console.color_system else "{trained} [masked]"
    for line in [*prepared.report.lines(), legend]:
        console.print(Text(visible(line)), soft_wrap=True)


def show_prompts(prepared: PreparedPrompts, tokenizer: PreTrainedTokenizerBase, *, rows: int) -> None:
    """Print the first `rows` prompts as the model reads them, the columns for rewards, and the totals."""
    console = Console(highlight=False, soft_wrap=True)
    for prompt in prepared.train.prompts[:rows]:
        console.print(f"{prompt.origin}: {len(prompt.tokens):,} tokens", style="bold", markup=False)
        text = _decoded(tokenizer, prompt.tokens)
        console.print(visible(text), markup=False)
        console.print(visible(f"columns {', '.join(prompt.row)}"), style=MASKED, markup=False)
        console.print()
    for line in prepared.report.lines():
        console.print(visible(line), markup=False)
