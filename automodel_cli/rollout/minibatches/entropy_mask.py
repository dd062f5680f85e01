"""Select the tokens of an update with the highest entropy (80/20 rule, arXiv:2506.01939)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample

_TIE = 1e-5
"""Tolerance in nats. First tokens of a group share a prompt and therefore an entropy, except for rounding."""


def add_entropy_mask(
    update: Minibatch, entropies: Sequence[Tensor], samples: Sequence[Sample], share: float, mesh: Mesh
) -> Minibatch:
    """Add the column `uncertain_BT`: 1 at generated tokens with high entropy, else 0.

    The threshold is the (1 - share) quantile over the tokens of the update on all ranks, interpolated as in TRL.
    Entropies within rounding below it are included. `entropies` has `[B, T]` per microbatch. Collective.

    Example: the entropies 0.1, 0.2, 0.3, 2.0 with share 0.25 have the threshold 0.725, so one token is selected.
    """
    entropies = [entropy_BT.cpu().double() for entropy_BT in entropies]
    # every token has its own index on all ranks, so the sum over ranks only copies values
    ends_N = np.cumsum([sample.num_generated for sample in samples])
    # Row 0 has the entropies, row 1 marks the tokens that any rank has. An entropy may be 0, so it cannot mark them
    # itself.
    known_2M = torch.zeros(2, int(ends_N[-1]), dtype=torch.float64)
    for batch, row, drawn_T, number in _sample_spans(update, samples):
        at = slice(int(ends_N[number]) - len(drawn_T), int(ends_N[number]))
        known_2M[0, at] = entropies[batch][row, drawn_T]
        known_2M[1, at] = 1
    entropy_M, held_M = mesh.sum_over(mesh.dp, known_2M).cpu().numpy()
    threshold = float(np.quantile(entropy_M[held_M > 0], 1 - share))
    masks = [torch.zeros(batch.shape) for batch in update.batches]
    for batch, row, drawn_T, _ in _sample_spans(update, samples):
        masks[batch][row, drawn_T] = (entropies[batch][row, drawn_T] >= threshold - _TIE).float()
    return update.with_column("uncertain_BT", masks)


def _sample_spans(update: Minibatch, samples: Sequence[Sample]) -> Iterator[tuple[int, int, Tensor, int]]:
    """Return microbatch, row, span of labels and index of each sample on this rank."""
    for batch, spread in enumerate(update.spread):
        for row, first, number in spread:
            yield batch, row, first + samples[number].generated_T().nonzero()[:, 0], number
