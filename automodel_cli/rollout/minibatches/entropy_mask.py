"""The tokens of an update whose choice was least certain: 80/20, arXiv:2506.01939."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample

_TIE = 1e-5
"""Nats. First tokens of a group have the same prompt, and so one entropy but for rounding, which layouts do apart."""


def add_entropy_mask(
    update: Minibatch, entropies: Sequence[Tensor], samples: Sequence[Sample], share: float, mesh: Mesh
) -> Minibatch:
    """`uncertain_BT`: 1 at the drawn tokens whose entropy (`[B, T]` for each microbatch) reaches the (1 - share)
    quantile of the update's tokens on all ranks, or falls short of it by rounding, else 0. Quantiles between two tokens
    are interpolated, as TRL's are. Collective.
    """
    entropies = [entropy_BT.cpu().double() for entropy_BT in entropies]
    # every token has a place of its own, whichever rank holds it, so the sum over ranks copies and does not round
    ends_N = np.cumsum([sample.num_generated for sample in samples])
    known_2M = torch.zeros(2, int(ends_N[-1]), dtype=torch.float64)
    for batch, row, drawn_T, number in _drawn(update, samples):
        at = slice(int(ends_N[number]) - len(drawn_T), int(ends_N[number]))
        known_2M[0, at] = entropies[batch][row, drawn_T]
        known_2M[1, at] = 1
    entropy_M, held_M = mesh.sum_over(mesh.dp, known_2M).cpu().numpy()
    threshold = float(np.quantile(entropy_M[held_M > 0], 1 - share))
    masks = [torch.zeros(batch.shape) for batch in update.batches]
    for batch, row, drawn_T, _ in _drawn(update, samples):
        masks[batch][row, drawn_T] = (entropies[batch][row, drawn_T] >= threshold - _TIE).float()
    return update.with_column("uncertain_BT", masks)


def _drawn(update: Minibatch, samples: Sequence[Sample]) -> Iterator[tuple[int, int, Tensor, int]]:
    """Of each sample on this rank: microbatch, row, where its drawn tokens' labels are, its number."""
    for batch, spread in enumerate(update.spread):
        for row, first, number in spread:
            yield batch, row, first + samples[number].generated_T().nonzero()[:, 0], number
