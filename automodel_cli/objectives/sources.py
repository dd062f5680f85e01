"""Loss weights and losses of the datasets of a mixture.

A sequence belongs to one dataset, so weights and losses are those of rows. Both are sums over the batch. They are exact
with packing, pipeline and context parallelism, because the head output of a microbatch has all its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from automodel_cli.data.head_output import LOSS_WEIGHTS, SOURCES
from automodel_cli.objectives.base import Metric, Objective, metrics_of, request_of, term_weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput, HeadRequest


class WeightedObjective(Objective, Protocol):
    """Objective whose loss is a sum over label tokens, each times the column `loss_weights_B` if there is one."""

    @property
    def uses_loss_weights(self) -> bool:
        """True."""
        ...


def uses_loss_weights(objective: Objective) -> bool:
    """Whether the objective is a `WeightedObjective`."""
    return bool(getattr(objective, "uses_loss_weights", False))


def weighted(values_BT: Tensor, batch: Batch) -> Tensor:
    """Return values of tokens, `[B, T]` or `[B, T, M]`, times the loss weight of their dataset."""
    weights_B = batch.extra.get(LOSS_WEIGHTS)
    return values_BT if weights_B is None else values_BT * weights_B.view(-1, *[1] * (values_BT.dim() - 1))


def label_weight(batch: Batch) -> Tensor:
    """Return the number of label tokens, each times the loss weight of its dataset: int64, or float64 with weights."""
    weights_B = batch.extra.get(LOSS_WEIGHTS)
    return batch.num_label_tokens if weights_B is None else (weights_B.double() * _labels(batch)).sum()


def _labels(batch: Batch) -> Tensor:
    from automodel_cli.data.batch import IGNORE_INDEX

    return (batch.labels_BT != IGNORE_INDEX).sum(1)


@dataclass(frozen=True)
class WithSourceLosses:
    """`objective` with the mean loss of the label tokens of each dataset, without its loss weight. Bits per byte of
    each dataset are measured if the objective measures those of all.

    `loss_NAME` is nan in a step without label tokens of the dataset. Both values are sums over all ranks.
    """

    objective: Objective
    names: tuple[str, ...]

    @property
    def needs(self) -> HeadRequest:
        return request_of(self.objective)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        metrics = dict(metrics_of(self.objective))
        for name in self.names:
            metrics[f"loss_{name}"] = Metric(per=f"num_label_tokens_{name}")
            metrics[f"num_label_tokens_{name}"] = Metric()
            if self._counts_bytes:
                metrics[f"bits_per_byte_{name}"] = Metric(per=f"num_bytes_{name}")
                metrics[f"num_bytes_{name}"] = Metric()
        return metrics

    @property
    def _counts_bytes(self) -> bool:
        return "bits_per_byte" in metrics_of(self.objective)

    def weight(self, batch: Batch) -> Tensor:
        return self.objective.weight(batch)

    def term_weights(self, batch: Batch) -> Mapping[str, Tensor]:
        return term_weights_of(self.objective, batch)

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return self.objective(output, batch)

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        import torch

        measure = getattr(self.objective, "measure", None)
        values: dict[str, Tensor] = {} if measure is None else measure(output, batch)
        loss_B, count_B = -output.logprobs_BT.sum(1), _labels(batch)
        sources_B = batch.extra.get(SOURCES)
        if sources_B is None:  # batches that are not read from the datasets, for example of a dry run
            sources_B = torch.full_like(count_B, -1)
        for index, name in enumerate(self.names):
            is_of_B = sources_B == index
            values[f"loss_{name}"] = torch.where(is_of_B, loss_B, 0.0).sum()
            values[f"num_label_tokens_{name}"] = torch.where(is_of_B, count_B, 0).sum().float()
            if self._counts_bytes:
                values[f"bits_per_byte_{name}"] = values[f"loss_{name}"] / math.log(2)
                values[f"num_bytes_{name}"] = (batch.extra["label_bytes_BT"].sum(1) * is_of_B).sum().float()
        return values


def with_source_losses(objective: Objective, names: tuple[str, ...]) -> Objective:
    """Return the objective with the loss of each dataset, if there are several and the objective has such losses."""
    if len(names) < 2 or not uses_loss_weights(objective):
        return objective
    return cast(Objective, WithSourceLosses(objective, names))
