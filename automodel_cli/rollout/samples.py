"""Pack samples of a rollout into microbatches, independently of the parallel layout.

Every rank has all samples of a step. Sequences are packed over all samples and then distributed, so that ranks have
equally many microbatches and results do not depend on the number of ranks.

Shapes: N samples, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, NO_RUN, ROUTED_EXPERTS, Batch, Run, SeenKeys
from automodel_cli.data.packing import best_fit_decreasing
from automodel_cli.rollout.types import Sample

_PARTS = (1, 2, 3, 4)
"""Into how many parts a row may be cut, for blocks that fill it better."""
SamplePosition = tuple[int, int, int]
"""Of one sample in a microbatch: its row there, the position of its first label, its number among all samples."""


@dataclass(frozen=True)
class PackingConfig:
    """Settings of packing: `seq_len` tokens per row. With `packed` several samples share a row, else rows have the
    length of the longest sample or pair (a multiple of `pad_to_multiple_of`). `fits` returns whether a rank
    supports a number of microbatches. With `share_prompt_prefix`, samples with the same prompt follow one copy of
    it."""

    seq_len: int
    packed: bool
    pad_to_multiple_of: int
    microbatch_size: int
    pad_id: int
    fits: Callable[[int], bool] = lambda count: True
    share_prompt_prefix: bool = False


@dataclass(frozen=True)
class Minibatch:
    """Microbatches of this rank for one optimizer update, and the positions of samples in them."""

    batches: list[Batch]
    spread: list[list[SamplePosition]]

    def with_column(self, name: str, values: Sequence[Tensor]) -> Minibatch:
        """Another column of `Batch.extra`, one tensor for each microbatch."""
        pairs = zip(self.batches, values, strict=True)
        return replace(self, batches=[b.with_columns(**{name: v}) for b, v in pairs])

    def with_values(self, name: str, values_N: Tensor, samples: Sequence[Sample]) -> Minibatch:
        """A column that holds one value for each sample, at all its labels."""
        columns, values = [], values_N.tolist()
        for batch, spread in zip(self.batches, self.spread, strict=True):
            column_BT = torch.zeros(batch.shape)
            for row, first, number in spread:
                sample = samples[number]
                # Tool replies between generated tokens have no label, and keep 0.
                column_BT[row, first : first + len(sample.tokens)] = sample.at_generated(values[number])
            columns.append(column_BT)
        return self.with_column(name, columns)

    def with_pairs(self, pairs: Sequence[Sequence[int]]) -> Minibatch:
        """`pairs_P2`: the documents of the samples of each pair, which share a row."""
        columns = []
        for batch, spread in zip(self.batches, self.spread, strict=True):
            documents_BT = batch.document_ids_BT
            document_of = {number: documents_BT[row, first].item() for row, first, number in spread}
            inside = [[document_of[number] for number in pair] for pair in pairs if pair[0] in document_of]
            columns.append(torch.tensor(inside, dtype=torch.int64).view(-1, 2))
        return self.with_column("pairs_P2", columns)


def pack_minibatches(
    samples: Sequence[Sample],
    trained: Sequence[Sequence[int]],
    num_updates: int,
    plan: PackingConfig,
    *,
    dp_rank: int,
    dp_size: int,
) -> list[Minibatch]:
    """Pack the `trained` samples into `num_updates` updates of about equal size, in order.

    The indices of one entry share a row. Empty updates are skipped. Every rank gets equally many microbatches, some of
    them without labels.

    Example: 6 samples and 2 updates give the updates [0, 1, 2] and [3, 4, 5]. With one sample per row,
    microbatch_size=1 and 2 ranks, an update has 3 rows. Each rank gets 2 microbatches, one of all 4 without labels.
    """
    parts = [part.tolist() for part in np.array_split(np.arange(len(trained)), num_updates)]
    return [_update(samples, [trained[i] for i in part], plan, dp_rank, dp_size) for part in parts if part]


def _update(
    samples: Sequence[Sample], chosen: Sequence[Sequence[int]], plan: PackingConfig, dp_rank: int, dp_size: int
) -> Minibatch:
    rows = _rows(samples, chosen, plan)
    longest = max(sum(_length(samples, block) for block in row) for row in rows)
    num_tokens = plan.seq_len if plan.packed else -(-longest // plan.pad_to_multiple_of) * plan.pad_to_multiple_of
    # One microbatch on every rank. Empty rows fill the last one, so that all ranks have the same number of collectives.
    unit = plan.microbatch_size * dp_size
    # 7 rows, microbatches of 2 on 2 ranks: ceil(7 / 4) = 2 microbatches per rank, and one empty row.
    count = -(-len(rows) // unit)
    while not plan.fits(count):
        count += 1
    rows += [[] for _ in range(count * unit - len(rows))]
    # Microbatches are dealt to ranks in turn: rank r takes r, r + dp_size, ...
    microbatches = [rows[first : first + plan.microbatch_size] for first in range(0, len(rows), plan.microbatch_size)]
    made = [_batch(samples, of_batch, num_tokens, plan.pad_id) for of_batch in microbatches[dp_rank::dp_size]]
    return Minibatch([batch for batch, _ in made], [spread for _, spread in made])


Block = tuple[int, ...]
"""Indices of samples that are adjacent in a row: a single one, or several after their shared prompt."""


def _rows(samples: Sequence[Sample], chosen: Sequence[Sequence[int]], plan: PackingConfig) -> list[list[Block]]:
    """Return the samples in few rows. A group that shares its prompt may be split into blocks, each with its own copy
    of the prompt, if this leaves fewer tokens unused."""
    apart: list[list[Block]] = [[(number,) for number in numbers] for numbers in chosen]
    if not plan.packed:
        return apart
    packings = [_packed(samples, apart, plan.seq_len)]
    if plan.share_prompt_prefix:
        groups = _sharing(samples, chosen)
        # Example: a prompt of 901 tokens, 8 responses of 300, seq_len 2048. One block of all would have 900 + 8 * 301 =
        # 3,308 tokens. Blocks of at most 2,048 hold three responses (1,803 tokens), each with its own copy of the
        # prompt.
        limits = [plan.seq_len // parts for parts in _PARTS]
        packings = [_packed(samples, _shared(samples, groups, limit), plan.seq_len) for limit in limits] + packings
    return min(packings, key=len)


def _packed(samples: Sequence[Sample], units: Sequence[Sequence[Block]], seq_len: int) -> list[list[Block]]:
    """Units of blocks, which must share a row, as rows."""
    lengths = np.array([sum(_length(samples, block) for block in unit) for unit in units], np.int64)
    bins = best_fit_decreasing(lengths, seq_len)
    rows: list[list[Block]] = [[] for _ in range(int(bins.max()) + 1)]
    for unit, row in zip(units, bins.tolist(), strict=True):
        rows[row] += unit
    return rows


def _sharing(samples: Sequence[Sample], chosen: Sequence[Sequence[int]]) -> list[list[Block]]:
    """Sort `chosen` so that samples with equal prompts are adjacent."""
    groups: dict[object, list[Block]] = {}
    for numbers in chosen:
        groups.setdefault(_what_is_shared(samples[numbers[0]]), []).append(tuple(numbers))
    return list(groups.values())


def _shared(samples: Sequence[Sample], groups: Sequence[Sequence[Block]], limit: int) -> list[list[Block]]:
    """Return one block per group, or several of at most `limit` tokens. Samples of one entry of `chosen` stay in one
    block."""
    blocks: list[list[Block]] = []
    for group in groups:
        block, num_tokens, num_shared = Block(), 0, len(samples[group[0][0]].prompt.tokens) - 1
        for numbers in group:
            # Tokens after the shared prompt. The last prompt token belongs to each response, because its label differs.
            own = sum(samples[number].length - num_shared for number in numbers)
            if block and num_shared + num_tokens + own > limit:
                blocks.append([block])
                block, num_tokens = (), 0
            block, num_tokens = block + numbers, num_tokens + own
        blocks.append([block])
    return blocks


def _what_is_shared(sample: Sample) -> object:
    """The same for samples whose prompts are read alike: of the same tokens, sent to the same experts."""
    experts = sample.routed_experts
    known = None if experts is None else experts[: len(sample.prompt.tokens) - 1].tobytes()
    return tuple(sample.prompt.tokens), known


def _num_shared(samples: Sequence[Sample], block: Block) -> int:
    """Tokens that the samples of a block share: their prompt without its last token, whose label is each one's own."""
    return len(samples[block[0]].prompt.tokens) - 1 if len(block) > 1 else 0


def _length(samples: Sequence[Sample], block: Block) -> int:
    """Return the tokens of a block in a row."""
    num_shared = _num_shared(samples, block)
    return num_shared + sum(samples[number].length - num_shared for number in block)


def _batch(
    samples: Sequence[Sample], rows: Sequence[Sequence[Block]], num_tokens: int, pad_id: int
) -> tuple[Batch, list[SamplePosition]]:
    """Build a batch. Prompt and response of a sample are one document, and labels are the generated tokens. In a
    block, the prompt without its last token is a document of its own, and each response is a document that starts
    with this token."""
    layout = _Layout((len(rows), num_tokens), pad_id, _routing_width(samples))
    for row, blocks in enumerate(rows):
        layout.begin(row)
        for block in blocks:
            num_shared, prefix = _num_shared(samples, block), NO_RUN
            if num_shared:
                prefix = layout.prompt(samples[block[0]], num_shared)
            for number in block:
                layout.sample(samples[number], number, prefix)
        layout.end()
    firsts = [blocks[0][0] if blocks else None for blocks in rows]
    numbers = [-1 if first is None else samples[first].prompt.number for first in firsts]
    return layout.batch(torch.tensor(numbers)), layout.spread


class _Layout:
    """Rows as they are filled, one token after another: numpy's arrays, since each sample writes a few numbers in many
    places, which costs torch three times as much."""

    def __init__(self, shape: tuple[int, int], pad_id: int, routing_width: int | None):
        self._num_tokens, self._row, self._at = shape[1], 0, 0
        self._ids_BT = np.full(shape, pad_id, np.int64)
        self._labels_BT = np.full(shape, IGNORE_INDEX, np.int64)
        self._positions_BT = np.zeros(shape, np.int64)
        self._extra = {name: np.zeros(shape, np.float32) for name in ("sampler_logprobs_BT", "rewards_BT")}
        if routing_width is not None:
            self._extra[ROUTED_EXPERTS] = np.full((*shape, routing_width), -1, np.int16)
        self._bounds, self._prefixes = [0], list[Run]()
        self.spread: list[SamplePosition] = []

    def begin(self, row: int) -> None:
        self._row, self._at = row, 0

    def end(self) -> None:
        """Add the rest of the sequence as a document of padding."""
        if self._at < self._num_tokens:
            self._document(0, self._num_tokens - self._at, NO_RUN)

    def prompt(self, sample: Sample, num_tokens: int) -> Run:
        """Position of the shared prompt that further documents attend to."""
        self._read(sample, 0, num_tokens)
        self._document(0, num_tokens, NO_RUN)
        return self._bounds[-2], num_tokens

    def sample(self, sample: Sample, number: int, prefix: Run) -> None:
        """Prompt and response, but for as much of them as the prefix has."""
        row, skipped = self._row, prefix[1]
        # The label of a position is the next token, so the first label is at the last prompt token. Example: prompt p0
        # p1 and response r0 r1 give ids p0 p1 r0 r1 and labels - r0 r1 -, with `first` at p1.
        first = self._at + len(sample.prompt.tokens) - 1 - skipped
        labelled = (row, slice(first, first + len(sample.tokens)))
        self._read(sample, skipped, sample.length)
        self._labels_BT[labelled] = sample.tokens
        self._extra["sampler_logprobs_BT"][labelled] = sample.logprobs
        self._extra["rewards_BT"][labelled] = sample.score.total
        if sample.generated is not None:
            is_reply = ~np.array(sample.generated, bool)
            self._labels_BT[labelled][is_reply] = IGNORE_INDEX
            self._extra["rewards_BT"][labelled][is_reply] = 0
        self._document(skipped, sample.length, prefix)
        self.spread.append((row, first, number))

    def _read(self, sample: Sample, begin: int, end: int) -> None:
        """Tokens of prompt and response from here on, and the experts that they went to as far as these are known."""
        tokens = [*sample.prompt.tokens, *sample.tokens][begin:end]
        self._ids_BT[self._row, self._at : self._at + len(tokens)] = tokens
        if sample.routed_experts is not None:
            known = sample.routed_experts[begin:end]
            width = self._extra[ROUTED_EXPERTS].shape[-1]
            self._extra[ROUTED_EXPERTS][self._row, self._at : self._at + len(known)] = known.reshape(-1, width)

    def _document(self, begin: int, end: int, prefix: Run) -> None:
        """One whose tokens are at these positions."""
        self._positions_BT[self._row, self._at : self._at + end - begin] = np.arange(begin, end)
        self._at += end - begin
        self._bounds.append(self._row * self._num_tokens + self._at)
        self._prefixes.append(prefix)

    def batch(self, row_ids_B: Tensor) -> Batch:
        cu_seqlens = torch.tensor(self._bounds, dtype=torch.int32)
        return Batch(
            input_ids_BT=torch.from_numpy(self._ids_BT),
            labels_BT=torch.from_numpy(self._labels_BT),
            position_ids_BT=torch.from_numpy(self._positions_BT),
            cu_seqlens=cu_seqlens,
            max_seqlen=int(cu_seqlens.diff().max()),
            row_ids_B=row_ids_B,
            extra={name: torch.from_numpy(values) for name, values in self._extra.items()},
            seen=SeenKeys.of(self._bounds, self._prefixes) if any(length for _, length in self._prefixes) else None,
        )


def _routing_width(samples: Sequence[Sample]) -> int | None:
    """Return layers x experts per token of the samples, or None if no sample has routed experts."""
    known = next((sample.routed_experts for sample in samples if sample.routed_experts is not None), None)
    return None if known is None else known[0].size
