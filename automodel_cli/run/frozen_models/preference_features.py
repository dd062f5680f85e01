"""Inputs of preference losses from the current policy, each computed in an extra forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.objectives.dpo import DPO
from automodel_cli.run.frozen_models.reference_model import batch_logprobs, sampling_distribution

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


def sharpened(session: Trainer, batches: list[Batch]) -> list[Batch]:
    """With `sharpened_logprobs_BT`, the log-probs of the labels at temperature 1/2. Collective."""
    with sampling_distribution(session.model, SamplingTransform(temperature=0.5)):
        logprobs = batch_logprobs(session.model.stages, batches, session.mesh.device)
    return [batch.with_columns(sharpened_logprobs_BT=of) for batch, of in zip(batches, logprobs, strict=True)]


def partners(session: Trainer, batches: list[Batch]) -> list[Batch]:
    """With `partners_P2`, which the pairs of all ranks decide together. Collective."""
    mesh, objective = session.mesh, cast(DPO, session.recipe.objective)
    on_device = [batch.to(mesh.device) for batch in batches]
    logprobs = batch_logprobs(session.model.stages, on_device, mesh.device)
    compared = [objective.compared(of, batch) for of, batch in zip(logprobs, on_device, strict=True)]
    mine_P3 = torch.cat([of_P3.cpu() for of_P3 in compared])
    everywhere: list[Tensor] = [mine_P3] * mesh.dp_size
    dist.all_gather_object(everywhere, mine_P3, group=mesh.dp.get_group())
    first = sum(len(of_P3) for of_P3 in everywhere[: mesh.dp_rank])
    partners_P2 = matched(torch.cat(everywhere))[first : first + len(mine_P3)]
    columns = partners_P2.to(mesh.device).split([len(of_P3) for of_P3 in compared])
    return [batch.with_columns(partners_P2=of) for batch, of in zip(on_device, columns, strict=True)]


def matched(compared_P3: Tensor) -> Tensor:
    """Match the values of the two kinds by rank order. `[P, 2]`: for each first and second value, the value of the
    other kind with the same rank. 0 for pairs that do not count."""
    counts_P = compared_P3[:, 2] > 0
    first_V, second_V = compared_P3[counts_P, 0], compared_P3[counts_P, 1]
    found_V2 = compared_P3.new_empty(len(first_V), 2)
    found_V2[first_V.argsort(stable=True), 0] = second_V.sort().values
    found_V2[second_V.argsort(stable=True), 1] = first_V.sort().values
    found_P2 = compared_P3.new_zeros(len(compared_P3), 2)
    found_P2[counts_P] = found_V2
    return found_P2
