"""Microbatches of a dry run, with the row and document lengths of the config and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, Batch, Pictures
from automodel_cli.dryrun import synthetic_pictures
from automodel_cli.dryrun.fake_device.torch_compat import unset_fake_temporarily
from automodel_cli.dryrun.synthetic_pictures import Document, PictureColumns, Size
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.models.hub.source import hf_config
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.objectives.base import request_of
from automodel_cli.run.plan_request import assumed_document
from automodel_cli.run.recipe import Recipe


@dataclass(frozen=True)
class Columns:
    """One microbatch on the host: integers with values, and columns without (meta tensors). `lengths` are those of its
    documents, without the padding between them."""

    lengths: tuple[int, ...]
    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    row_ids: Tensor
    integers: dict[str, Tensor] = field(default_factory=dict)
    unknown: dict[str, Tensor] = field(default_factory=dict)
    pictures: PictureColumns | None = None


@dataclass(frozen=True)
class DocumentLengths:
    """`lengths` in the order in which packed rows take them, again and again, and where they come from. `rows`: those
    of each row instead, where rows are not packed. `processor`: of the pictures of documents."""

    documents: tuple[Document, ...]
    source: str
    rows: tuple[tuple[Document, ...], ...] = ()
    processor: FamilyProcessor | None = None

    @property
    def alike(self) -> bool:
        """Whether all microbatches hold as much."""
        return len(set(self.rows)) <= 1


def document_lengths(
    recipe: Recipe, asked: int | None, *, read: bool = False, picture: str | None = None
) -> DocumentLengths:
    """`asked` tokens each; else those of the recipe's data, which is prepared for it with `read`, or if it is made in
    code; else a stated default.

    Rows that are not packed hold one document, or a pair of them: as long as the row where nothing is known. Of a model
    that reads pictures, documents show those of the data, or one of the size `picture` (WIDTHxHEIGHT), or as many image
    tokens as they have room for. Raises ConfigError.
    """
    whole, unpacked = recipe.data.seq_len, recipe.data.packing == "none" and recipe.kind != "grpo"
    if picture is not None and recipe.model.vision is None:
        raise ConfigError(
            f"--picture {picture} has no effect, because the model reads text only",
            code="no_effect",
            keys=("--picture", "model.vision"),
            fix="remove --picture",
        )
    processor = synthetic_pictures.processor_of(recipe.model)
    chosen = asked is not None or picture is not None
    if not chosen and (read or recipe.data.generator is not None) and recipe.kind != "grpo":
        return _prepared_lengths(recipe, unpacked, processor)
    assumed = assumed_document(recipe)
    in_row = whole // assumed if unpacked else 1
    length = min(asked or assumed, whole // in_row)
    document, shows = Document(length), ""
    if processor is not None:
        length = length if asked or unpacked else whole // max(1, round(whole / assumed))
        document = synthetic_pictures.assumed_document(processor, length, whole // in_row, picture)
        length, (size, *_) = document.tokens, document.pictures
        shows = f" with {len(document.pictures)} picture of {size.width}x{size.height} pixels"
    rows = ((document,) * in_row,) if unpacked else ()
    options = "--document N" if processor is None else "--document N --picture WxH"
    source = f"{length} tokens each{shows} (assumed: the data was not read; {options})"
    if asked is not None:
        source = f"{length} tokens each{shows}, as asked"
    elif unpacked:
        source = f"{in_row} of {length} tokens a row{shows} (the longest there can be)"
    return DocumentLengths((document,), source, rows, processor)


def lengths_of(recipe: Recipe, request: TraceRequest) -> DocumentLengths:
    """Return the document lengths of a request."""
    return document_lengths(recipe, request.document, read=request.data, picture=request.picture)


def _prepared_lengths(recipe: Recipe, unpacked: bool, processor: FamilyProcessor | None) -> DocumentLengths:
    """Of the first rows of the data as a run would read it."""
    from automodel_cli.models.tokenizer import load_tokenizer

    found = recipe.prepared(load_tokenizer(recipe.model)).train
    rows = []
    for row in range(min(64, len(found))):
        lengths = found.tokens(row)[2][1:] - found.tokens(row)[2][:-1]
        shown = found.shown(row, len(lengths)) if processor is not None else [[]] * len(lengths)
        sizes = [tuple(Size(*table.size(number)) for table, number in of_document) for of_document in shown]
        rows.append(tuple(map(Document, map(int, lengths), sizes)))
    documents = tuple(document for row in rows for document in row)
    mean = sum(document.tokens for document in documents) / len(documents)
    source = f"{mean:.0f} tokens on average, as in the prepared data"
    if processor is not None:
        number = sum(len(document.pictures) for document in documents)
        source = f"{mean:.0f} tokens and {number / len(documents):.2g} pictures on average, as in the prepared data"
    return DocumentLengths(documents, source, tuple(rows) if unpacked else (), processor)


def microbatches(recipe: Recipe, documents: DocumentLengths, number: int) -> list[Columns]:
    """Rows filled with documents to the last token; rows that are not packed as they are collated, padded to the
    longest of their microbatch or to the row's length. Every token but a document's last is a label, as it is where
    `mask=all`: nothing needs more memory."""
    names = frozenset(getattr(recipe.objective, "columns", ()))
    outputs = request_of(recipe.objective).scores
    has_width = any(name.endswith("D") for name in names)
    width = hf_config(recipe.model).get_text_config().hidden_size if has_width else 0
    compared = _tokens_of_a_teacher(recipe) if any(name.endswith("_BTN") for name in names) else 0
    taken = _unpacked(recipe, documents) if documents.rows else _packed(recipe, documents)
    found = []
    for index in range(number):
        rows, tokens = next(taken)
        one = _microbatch(index, rows, tokens, names, compared, outputs, width)
        found.append(one if documents.processor is None else _with_pictures(one, rows, documents.processor))
    return found


def _with_pictures(one: Columns, rows: Rows, processor: FamilyProcessor) -> Columns:
    ids, pictures = synthetic_pictures.with_pictures(one.input_ids, rows, processor)
    is_next_shown = torch.nn.functional.pad(ids[:, 1:] == pictures.placeholder, (0, 1))
    return replace(one, input_ids=ids, labels=one.labels.masked_fill(is_next_shown, IGNORE_INDEX), pictures=pictures)


Rows = list[list[Document]]
"""The documents of each row."""


def _packed(recipe: Recipe, documents: DocumentLengths) -> Iterator[tuple[Rows, int]]:
    """Rows, and how many tokens each of them has."""
    tokens, given = recipe.data.seq_len, cycle(documents.documents)
    while True:
        rows: Rows = []
        for _ in range(recipe.train.microbatch_size):
            rows.append([])
            while (left := tokens - _length(rows[-1])) > 0:
                rows[-1].append(synthetic_pictures.cut(next(given), left, documents.processor))
        yield rows, tokens


def _length(row: Sequence[Document]) -> int:
    return sum(document.tokens for document in row)


def _unpacked(recipe: Recipe, documents: DocumentLengths) -> Iterator[tuple[Rows, int]]:
    """The same for rows that the data gave; what they are padded with follows."""
    data, given = recipe.data, cycle(documents.rows)
    while True:
        rows = [list(next(given)) for _ in range(recipe.train.microbatch_size)]
        longest = max(map(_length, rows))
        tokens = (
            data.seq_len
            if data.padding == "seq_len"
            else -(-longest // data.pad_to_multiple_of) * data.pad_to_multiple_of
        )
        yield rows, tokens


def _tokens_of_a_teacher(recipe: Recipe) -> int:
    """N of columns `[B, T, N]`: the likeliest, or the whole vocabulary, which is the student's."""
    whole: int = hf_config(recipe.model).get_text_config().vocab_size
    return getattr(recipe.objective, "top_k", None) or whole


def _microbatch(
    index: int, rows: Rows, tokens: int, names: frozenset[str], compared: int, outputs: int, width: int
) -> Columns:
    lengths = [document.tokens for row in rows for document in row]
    padded = [
        [*(document.tokens for document in row), *([tokens - _length(row)] if _length(row) < tokens else [])]
        for row in rows
    ]
    sizes = torch.tensor([n for row in padded for n in row])
    ends = sizes.cumsum(0)
    is_padding = torch.tensor(
        [i >= len(row) for row, others in zip(rows, padded, strict=True) for i in range(len(others))]
    )
    ids = torch.arange(len(rows) * tokens).remainder(1000).view(len(rows), tokens)
    labels = ids.masked_fill(is_padding.repeat_interleave(sizes).view_as(ids), IGNORE_INDEX)
    labels.view(-1)[ends - 1] = IGNORE_INDEX
    positions = torch.cat([torch.arange(n) for n in sizes.tolist()]).view_as(ids)
    pairs, documents = max(1, len(lengths) // 2), is_padding.logical_not().nonzero()[:, 0]
    known = {
        "pairs_P2": documents[torch.arange(2 * pairs) % len(documents)].view(-1, 2),
        "desirable_S": torch.arange(len(sizes)) % 2,
        "roles_S": torch.where(is_padding, -1, torch.arange(len(sizes)) % 2),
    }
    letters = {"B": len(rows), "T": tokens, "S": len(sizes), "P": pairs, "N": compared, "L": outputs, "D": width}
    return Columns(
        tuple(lengths),
        ids,
        labels,
        positions,
        torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
        torch.full((len(rows),), index),
        {name: column for name, column in known.items() if name in names},
        {name: _column(name, letters) for name in names - known.keys()},
    )


def _column(name: str, letters: dict[str, int]) -> Tensor:
    """One without values, of the shape that the end of its name says: `teacher_ids_BTN` is rows x tokens x N ids."""
    shape = [letters[x] if x in letters else int(x) for x in name.rpartition("_")[2]]
    return torch.empty(shape, dtype=torch.int64 if "_ids_" in name else torch.float32, device="meta")


def as_batches(columns: Sequence[Columns], keep: Callable[[Tensor, Tensor], None]) -> list[Batch]:
    """The same as batches of fake host tensors, under the fake mode; `keep(fake, real)` remembers the integers."""

    def fake(real: Tensor) -> Tensor:
        tensor = torch.empty(real.shape, dtype=real.dtype)
        keep(tensor, real)
        return tensor

    def shown(one: PictureColumns | None) -> Pictures | None:
        if one is None:
            return None
        inputs = {
            name: torch.empty(real.shape, dtype=real.dtype) if real.is_meta else fake(real)
            for name, real in one.inputs.items()
        }
        positions, blank_ids = (None if real is None else fake(real) for real in (one.positions, one.blank_ids))
        return Pictures(inputs, one.placeholder, positions, blank_ids)

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
            pictures=shown(one.pictures),
        )
        for one in columns
    ]
