"""The loss on rows that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.objectives.base import Objective, request_of
from automodel_cli.objectives.denominators import with_denominators
from automodel_cli.training.metrics.metric_accumulator import MetricAccumulator
from automodel_cli.training.stages import Stages


@dataclass(frozen=True)
class ValidationResult:
    """Scalars, equal on every rank. `loss` is nan if no token has a weight."""

    loss: Tensor
    metrics: dict[str, Tensor]


def validate(stages: Stages, batches: Sequence[Batch], objective: Objective, mesh: Mesh) -> ValidationResult:
    """Compute the objective per unit of weight over all ranks' batches, like the loss of `train_step`, and its metrics.

    Collective. Every rank passes the same number of batches.
    """
    tally = MetricAccumulator(objective, mesh.device)
    weight, batches = with_denominators(objective, batches, lambda local: mesh.sum_over(mesh.dp, local))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def reduce(output: HeadOutput, batch: Batch) -> Tensor:
        return torch.cat([objective(output, batch)[None], tally.measure(output, batch)])

    for number, batch in enumerate(batches):  # one at a time: a validation set need not fit on the device
        on_device = batch.to(mesh.device)
        values = stages.forward([on_device], reduce, request_of(objective))[0]
        total += values[0]
        tally.keep(number, values[1:])
    # every rank of a pipeline holds these values, so they add up over dp only
    totals = mesh.sum_over(mesh.dp, torch.cat([total[None], tally.sums().double()]))
    return ValidationResult(totals[0] / weight, tally.result(totals[1:].float(), mesh))
