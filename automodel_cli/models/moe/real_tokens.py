"""Which tokens count as load of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, SeenKeys

if TYPE_CHECKING:
    pass


def real_tokens(labels_BT: Tensor, cu_seqlens: Tensor, seen: SeenKeys | None = None) -> Tensor:
    """Return a bool mask `[B, T]` of real tokens: documents with a label, and the prefixes that they see.

    No host synchronization.
    """
    labeled_N = (labels_BT != IGNORE_INDEX).flatten()
    token_N = torch.arange(len(labeled_N), device=labels_BT.device)
    # Example: cu_seqlens 0 3 5. Tokens 0 to 2 are in document 0, tokens 3 and 4 in document 1.
    # `right=True` puts a boundary into the document that starts there. A padding token behaves like any other document.
    document_N = torch.bucketize(token_N, cu_seqlens[1:], right=True)
    num_labels = torch.zeros(len(cu_seqlens), dtype=torch.int64, device=labels_BT.device)
    num_labels.index_add_(0, document_N, labeled_N.long())
    real_N = num_labels[document_N] > 0
    if seen is not None:
        key_M = torch.arange(len(seen.index_M), device=labels_BT.device)
        # A prefix has no labels. It counts if any document that attends to it has one.
        sees_M = num_labels[torch.bucketize(key_M, seen.cu_seqlens[1:], right=True)] > 0
        real_N = real_N.int().scatter_reduce(0, seen.index_M, sees_M.int(), "amax") > 0
    return real_N.view_as(labels_BT)
