"""Microbatches that reveal errors: uneven documents, label masks that differ between ranks, one without labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.parity.cases import NUM_MICROBATCHES

PACKED_ROWS = ((5, 7, 10), (15, 7))  # document lengths of two rows
PADDED_ROWS = ((11, 11), (20, 2))  # a document, then padding
_SMALLEST_TOKEN, _VOCAB = 3, 150
NUM_CLASSES = 3
"""Labels of the columns of classifiers."""


def step_batches(*, packed: bool, count: int = NUM_MICROBATCHES, num_outputs: int = 0) -> list[Batch]:
    """Return the microbatches of one optimizer step. Data-parallel rank r of n uses the r-th of n equal parts.

    Rows have 22 tokens, which context parallelism does not divide. The first microbatch of the last quarter has no
    labels. Its ranks must still take part in collectives.

    Args:
        num_outputs: of the classification head. 0: the columns of classifiers have `NUM_CLASSES`.
    """
    ignored = count * 3 // 4 if count > 1 else -1
    classes = num_outputs or NUM_CLASSES
    return [microbatch(i, packed=packed, all_ignored=i == ignored, num_outputs=classes) for i in range(count)]


def microbatch(index: int, *, packed: bool, all_ignored: bool = False, num_outputs: int = NUM_CLASSES) -> Batch:
    """Return two rows that are unique to `index`. The first `index % 8` labels are masked."""
    lengths = PACKED_ROWS if packed else PADDED_ROWS
    rows = [[token_row(n, seed=100 * index + 10 * r + d) for d, n in enumerate(row)] for r, row in enumerate(lengths)]
    batch = packed_batch(rows)
    labels_BT = batch.labels_BT.clone()
    labels_BT[:, : index % 8] = IGNORE_INDEX
    if not packed:
        for r, (document, _) in enumerate(lengths):
            labels_BT[r, document:] = IGNORE_INDEX
    if all_ignored:
        labels_BT[:] = IGNORE_INDEX
    batch = replace(batch, labels_BT=labels_BT, row_ids_B=torch.arange(2) + 2 * index)
    return replace(batch, extra=columns(batch, seed=index, num_outputs=num_outputs))


def columns(batch: Batch, seed: int, num_outputs: int = NUM_CLASSES) -> dict[str, Tensor]:
    """Return every column that an objective may read (`objectives/base.py`), with values of realistic size."""
    generator = torch.Generator().manual_seed(1000 + seed)
    documents_BT, count = batch.document_ids_BT, batch.num_documents
    labeled = documents_BT[batch.labels_BT != IGNORE_INDEX].unique()
    desirable_S = torch.full((count,), -1).index_copy(0, labeled, labeled % 2)
    extra = {
        "pairs_P2": labeled[: len(labeled) // 2 * 2].view(-1, 2),
        "desirable_S": desirable_S,
        "kl_baseline_1": torch.tensor([0.1]),
        "advantages_BT": torch.randn(count, generator=generator)[documents_BT],
        "rewards_BT": (documents_BT % 2).float(),
        "uncertain_BT": (batch.position_ids_BT % 3 > 0).float(),
    }
    extra["label_bytes_BT"] = (batch.labels_BT % 4 + 1) * (batch.labels_BT != IGNORE_INDEX)
    for name in ("old_values", "returns"):
        extra[f"{name}_BT"] = torch.randn(batch.shape, generator=generator)
    extra["partners_P2"] = torch.randn(extra["pairs_P2"].shape, generator=generator)
    for name in ("ref", "sampler", "old", "sharpened"):  # typical log-probs of a random model
        extra[f"{name}_logprobs_BT"] = torch.randn(batch.shape, generator=generator) * 0.3 - math.log(_VOCAB)
    extra["margins_P"] = torch.rand(len(extra["pairs_P2"]), generator=generator)
    teacher_BTV = torch.randn(*batch.shape, _VOCAB, generator=generator).log_softmax(-1)
    is_labeled_S = desirable_S >= 0
    extra["class_ids_S"] = torch.where(is_labeled_S, torch.arange(count) % num_outputs, -1)
    extra["targets_SL"] = torch.rand(count, num_outputs, generator=generator)
    extra["targets_SL"] = extra["targets_SL"].masked_fill(~is_labeled_S[:, None], math.nan)
    extra["class_ids_BT"] = torch.where(batch.labels_BT == IGNORE_INDEX, -1, batch.input_ids_BT % num_outputs)
    extra["teacher_logprobs_BTN"], extra["teacher_ids_BTN"] = teacher_BTV.topk(4)
    return extra


def token_row(length: int, seed: int = 0) -> Tensor:
    """Return one document, int64 `[length]`, without special tokens of the tiny copies."""
    return torch.randint(_SMALLEST_TOKEN, _VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def next_token_labels(ids_T: Tensor) -> Tensor:
    return F.pad(ids_T[1:], (0, 1), value=IGNORE_INDEX)


def packed_batch(rows: Sequence[Sequence[Tensor]]) -> Batch:
    """Pack documents into rows of equal length. Every token except the first of a document is a label."""
    documents = [document for row in rows for document in row]
    lengths = [len(document) for document in documents]
    return Batch(
        input_ids_BT=torch.stack([torch.cat(list(row)) for row in rows]),
        labels_BT=torch.stack([torch.cat([next_token_labels(d) for d in row]) for row in rows]),
        position_ids_BT=torch.stack([torch.cat([torch.arange(len(d)) for d in row]) for row in rows]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=max(lengths),
        row_ids_B=torch.arange(len(rows)),
    )
