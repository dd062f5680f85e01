"""Accumulate an objective's metrics over microbatches and ranks: collected at the LM head, reduced once."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.objectives.base import MeasuredObjective, Objective, metrics_of


class MetricAccumulator:
    """Metrics of an objective on this rank's microbatches, as one vector of sums and one of extrema.

    Both are empty for an objective without metrics; then nothing is communicated. Minima are stored negated, so that
    all extrema are maxima. A microbatch that is passed twice counts once.
    """

    def __init__(self, objective: Objective, device: torch.device):
        self._metrics = metrics_of(objective)
        self._measured = cast(MeasuredObjective, objective)  # used only if it declares metrics
        self._sums = [name for name, metric in self._metrics.items() if metric.combine == "sum"]
        self._extrema = [name for name, metric in self._metrics.items() if metric.combine != "sum"]
        self._device = device
        self._seen: dict[int, Tensor] = {}

    @torch.no_grad()
    def measure(self, output: HeadOutput, batch: Batch) -> Tensor:
        """fp32 vector of one microbatch: its sums, then its extrema."""
        if not self._metrics:
            return torch.zeros(0, device=output.logprobs_BT.device)
        values = self._measured.measure(output.detach(), batch)
        assert set(values) == set(self._metrics), f"measured {sorted(values)}, declared {sorted(self._metrics)}"
        # Sums and counts, not means: the mean over ranks of unequal numbers of tokens is the sum of sums over the sum
        # of counts.
        sums = [values[name].float() for name in self._sums]
        extrema = [self._signed(name, values[name].float()) for name in self._extrema]
        return torch.stack([*sums, *extrema])

    def add(self, output: HeadOutput, batch: Batch) -> None:
        """Measure a microbatch, of a list that outlives this object, and keep the result."""
        if self._metrics:
            # By identity: a second measurement of a microbatch replaces the first.
            self.keep(id(batch), self.measure(output, batch))

    def keep(self, key: int, measured: Tensor) -> None:
        """Store the result of `measure` for the microbatch with this key."""
        self._seen[key] = measured

    def sums(self) -> Tensor:
        """Return this rank's sums, zeros without microbatches, to be summed over ranks."""
        if not self._seen:
            return torch.zeros(len(self._sums), device=self._device)
        return torch.stack([*self._seen.values()])[:, : len(self._sums)].sum(0)

    def result(self, sums: Tensor, mesh: Mesh) -> dict[str, Tensor]:
        """The metrics of the step, equal on every rank, from the sums over ranks. Collective if there are extrema."""
        numbers = dict(zip(self._sums, sums.unbind(), strict=True))
        counts = dict(numbers)
        for name in self._sums:
            if (per := self._metrics[name].per) is not None:
                numbers[name] = numbers[name] / counts[per]
        if self._extrema:
            numbers |= self._largest(mesh)
        return {name: numbers[name] for name in self._metrics}

    def _largest(self, mesh: Mesh) -> dict[str, Tensor]:
        if self._seen:
            largest = torch.stack([*self._seen.values()])[:, len(self._sums) :].amax(0)
        else:
            largest = torch.full((len(self._extrema),), float("-inf"), device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.loss.get_group())
        return {n: self._signed(n, value) for n, value in zip(self._extrema, largest.unbind(), strict=True)}

    def _signed(self, name: str, value: Tensor) -> Tensor:
        return -value if self._metrics[name].combine == "min" else value


def shown_metrics(objective: Objective) -> set[str]:
    """Names of the metrics that belong on the step line."""
    return {name for name, metric in metrics_of(objective).items() if metric.shown}
