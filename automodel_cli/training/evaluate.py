"""The loss on rows that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.objectives.base import Objective
from automodel_cli.training.stages import Stages


def evaluate(stages: Stages, batches: Sequence[Batch], objective: Objective, mesh: Mesh) -> Tensor:
    """The objective over all ranks' batches, per unit of weight: what `train_step` calls the loss, without a step.

    Collective; every rank brings equally many batches. A scalar, equal on every rank; nan where nothing has a weight.
    """
    weight = torch.zeros((), dtype=torch.float64, device=mesh.device)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:  # one at a time: a validation set need not fit on the device
        on_device = batch.to(mesh.device)
        weight += objective.weight(on_device)
        total += stages.forward([on_device], objective)[0]
    return mesh.sum_over(mesh.dp, total) / mesh.sum_over(mesh.dp, weight)
