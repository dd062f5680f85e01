"""Reductions over the documents of a batch, without loops over sequences and host synchronization."""

from __future__ import annotations

from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch


def label_mask(batch: Batch) -> Tensor:
    """Return bool `[B, T]`: tokens with a label."""
    return batch.labels_BT != IGNORE_INDEX


def sum_by_document(values_BT: Tensor, batch: Batch) -> Tensor:
    """Return the sum over each document's tokens, `[documents]`. Values of ignored labels must be 0."""
    # Example: cu_seqlens 0 3 5 and values 1 2 3 | 4 5 give the sums 6 and 9, and `to_tokens` gives 6 6 6 | 9 9. Padding
    # is a document too, whose labels are ignored.
    sums_S = values_BT.new_zeros(batch.num_documents)
    return sums_S.scatter_add(0, batch.document_ids_BT.flatten(), values_BT.flatten())


def labels_by_document(batch: Batch) -> Tensor:
    """Return the number of label tokens of each document, fp32 `[documents]`."""
    return sum_by_document(label_mask(batch).float(), batch)


def to_tokens(values_S: Tensor, batch: Batch) -> Tensor:
    """Return each document's value at all of its tokens, `[B, T]`."""
    return values_S[batch.document_ids_BT]


def at_last_token(values_BT: Tensor, batch: Batch) -> Tensor:
    """Return the value of each document's last token, `[documents]`."""
    return values_BT.flatten()[batch.cu_seqlens[1:].long() - 1]


def mean_by_document(values_TD: Tensor, batch: Batch) -> Tensor:
    """Return the mean over each document's tokens, `[documents, D]`, of `[B*T, D]`."""
    sums_SD = values_TD.new_zeros(batch.num_documents, values_TD.shape[1])
    sums_SD = sums_SD.index_add(0, batch.document_ids_BT.flatten(), values_TD)
    return sums_SD / batch.cu_seqlens.diff()[:, None]
