"""Accuracy on held-out rows with pictures, and on the same rows with white pictures.

An answer is right if every trained token is the likeliest one. Greedy decoding then writes exactly this answer. The
accuracy with white pictures shows how much of it needs no picture.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.data.preparation.dataloader import eval_batches
from automodel_cli.training.callback import Callback, Run

if TYPE_CHECKING:
    from automodel_cli.data.preparation.dataset import PackedDataset
    from automodel_cli.run.trainer import Trainer


class PictureAccuracy(Callback):
    """`val_accuracy` and `val_accuracy_blank`."""

    def __init__(self, session: Trainer):
        self._session = session

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        rows = self._session.data.validation
        if rows is None:
            return {}
        blank = copy.copy(rows)
        blank.pictures = rows.pictures.blanked()
        return {"val_accuracy": self._share(rows), "val_accuracy_blank": self._share(blank)}

    def _share(self, rows: PackedDataset) -> float:
        session = self._session
        batches = eval_batches(
            rows,
            microbatch_size=session.recipe.train.microbatch_size,
            dp_rank=session.mesh.dp_rank,
            dp_size=session.mesh.dp_size,
            num_batches=session.recipe.validation.num_batches,
        )
        counts = [
            session.model.stages.forward([batch.to(session.mesh.device)], answered, HeadRequest(topk=1))[0]
            for batch in batches
        ]
        num_right, number = session.mesh.sum_over(session.mesh.dp, torch.stack(counts).sum(0)).tolist()
        return float(num_right / number) if number else float("nan")

    def show(self, step: int) -> None:
        """Print the accuracy. Validate first if this step has no result. Collective."""
        session = self._session
        if session.data.validation is None:
            return
        if session.last_validation[0] != step:
            session.validate(step)
        found = session.last_validation[1]
        session.meter.print(
            f"held-out answers right: {found['val_accuracy']:.1%}; with white pictures: "
            f"{found['val_accuracy_blank']:.1%}"
        )


def answered(output: HeadOutput, batch: Batch) -> Tensor:
    """Return the numbers of documents that are right, and of all documents with labels, float32 `[2]`."""
    assert output.topk_ids_BTK is not None
    is_label_BT = batch.labels_BT != IGNORE_INDEX
    is_wrong_BT = is_label_BT & (output.topk_ids_BTK[..., 0] != batch.labels_BT)
    documents_N = batch.document_ids_BT.flatten()
    zeros = torch.zeros(batch.num_documents, device=documents_N.device)
    num_labels = zeros.index_add(0, documents_N, is_label_BT.flatten().float())
    num_wrong = zeros.index_add(0, documents_N, is_wrong_BT.flatten().float())
    has_labels = num_labels > 0
    return torch.stack([(has_labels & (num_wrong == 0)).sum(), has_labels.sum()]).float()
