"""Validation of classifiers: loss and metrics of the scores of all held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.evaluation.classification_metrics import classification_metrics
from automodel_cli.evaluation.held_out_metrics import HeldOutMetrics
from automodel_cli.training.callback import Run

if TYPE_CHECKING:
    from automodel_cli.objectives.classification import Classification
    from automodel_cli.run.trainer import Trainer


class HeldOutScores(HeldOutMetrics):
    """`val_loss` and the metrics of `classification_metrics` as `val_accuracy` and so on."""

    shown: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy",
        "f1": "F1",
        "auroc": "AUROC",
        "mae": "mean absolute error",
        "pearson": "Pearson",
        "spearman": "Spearman",
    }
    unit: ClassVar[tuple[str, str]] = ("num_examples", "held-out examples")

    def __init__(self, session: Trainer, objective: Classification):
        super().__init__(session)
        self._objective = objective

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        if self._session.data.validation is None:
            return {}
        scores_NL, targets = self._gathered()
        if not len(scores_NL):
            return {}
        weight = self._objective.weights(targets).double().sum()
        loss = self._objective.losses(scores_NL.double(), targets).sum() / weight
        metrics = classification_metrics(self._objective.problem, scores_NL.numpy(), targets.numpy())
        counted = {"num_examples": float(len(scores_NL))}
        return {"val_loss": loss.item()} | {f"val_{name}": value for name, value in (metrics | counted).items()}

    def about(self) -> list[tuple[str, str]]:
        """Return a row of the startup summary: how often each label occurs in the training rows."""
        train, labels = self._session.data.train, self._objective.labels
        if self._objective.problem == "regression":
            return []
        if self._objective.of_tokens:
            found = np.concatenate([store.classes for store in train.stores])
            counts = np.bincount(found[found >= 0], minlength=len(labels))
        else:
            targets = np.concatenate([store.targets for store in train.stores])
            single = self._objective.problem == "single_label_classification"
            counts = np.bincount(targets[:, 0].astype(int), minlength=len(labels)) if single else targets.sum(0)
        text = ", ".join(f"{label} {int(count):,}" for label, count in zip(labels, counts, strict=True))
        absent = [label for label, count in zip(labels, counts, strict=True) if not count]
        return [("labels", text + (f"; warning: no training row has {', '.join(absent)}" if absent else ""))]

    def _gathered(self) -> tuple[Tensor, Tensor]:
        """Return scores and targets of the held-out rows of all ranks, on the CPU. Collective."""
        session, objective = self._session, self._objective
        local: list[tuple[Tensor, Tensor]] = []
        for batch in self.batches():  # one at a time: a validation set need not fit on the device
            on_device = batch.to(session.mesh.device)
            (scores_NL,) = session.model.stages.forward([on_device], self._scores, objective.needs)
            local.append(objective.labeled(scores_NL.cpu(), batch))
        everywhere: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(session.mesh.dp_size)]
        dist.all_gather_object(everywhere, local, group=session.mesh.dp.get_group())
        pairs = [pair for of_rank in everywhere for pair in of_rank]
        return torch.cat([scores for scores, _ in pairs]), torch.cat([targets for _, targets in pairs])

    def _scores(self, output: HeadOutput, batch: Batch) -> Tensor:
        return self._objective.scores(output, batch)
