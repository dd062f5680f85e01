"""Denominators of a step: of the loss, and of terms with their own denominator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.objectives.base import Objective, term_weights_of


def with_denominators(
    objective: Objective, batches: Sequence[Batch], total: Callable[[Tensor], Tensor] = lambda local: local
) -> tuple[Tensor, list[Batch]]:
    """Return the sum of `objective.weight` over the step, and the batches with the columns of `TermWeights`.

    `total` sums a vector over the ranks. It is called once.
    """
    terms = [term_weights_of(objective, batch) for batch in batches]
    names = list(terms[0])
    local = [
        (objective.weight(batch), *batch_terms.values()) for batch, batch_terms in zip(batches, terms, strict=True)
    ]
    # One kernel for all microbatches.
    # [microbatches, 1 + terms] -> sums over the microbatches [1 + terms] -> sums over the ranks
    sums = total(torch.stack([value for batch_terms in local for value in batch_terms]).view(len(local), -1).sum(0))
    weight = sums[0]
    if not names:
        return weight, list(batches)
    # The step divides everything by `weight`. A term with its own denominator d is multiplied by weight / d before, so
    # that the result is its sum / d. Example: weight 400 and d 100 give the scale 4.
    scales = torch.where(sums[1:] > 0, weight / sums[1:].clamp(min=1), 0.0).float()
    columns = {name: scales[i : i + 1] for i, name in enumerate(names)}
    return weight, [batch.with_columns(**columns) for batch in batches]
