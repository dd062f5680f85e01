"""The optimizer step for all objectives, parallelizers and pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.gradients import clip_grad_norm_
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.objectives.base import Objective, request_of
from automodel_cli.objectives.denominators import with_denominators
from automodel_cli.training.metrics.metric_accumulator import MetricAccumulator
from automodel_cli.training.stages import LossFn, Stages
from automodel_cli.training.torch_compat import step_if_finite

_NUM_SIGNALS = 32


@dataclass(frozen=True)
class StepResult:
    """Scalars of one step, equal on all ranks. They stay on the device until they are logged."""

    loss: Tensor
    """Sum of the objective divided by `weight`, fp32."""
    grad_norm: Tensor
    """Gradient norm before clipping, float64."""
    weight: Tensor
    """Denominator of the loss: number of label tokens, pairs or sequences."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Additional metrics of the objective (`MeasuredObjective`) and of hooks."""
    stop_signal: int = 0
    """Maximum `stop_signal` over ranks, on the host."""
    busy_seconds: Tensor = field(default_factory=lambda: torch.zeros(1))
    """`busy_seconds` of each rank, (ranks,)."""
    data_seconds: Tensor = field(default_factory=lambda: torch.zeros(1))
    """`data_seconds` of each rank, (ranks,)."""


class StepHook(Protocol):
    """Code that runs once per optimizer step, for example router statistics and bias updates."""

    def begin(self, batches: Sequence[Batch]) -> None:
        """Run before the first forward, with the microbatches of this rank on the device. Collective."""
        ...

    def finish(self) -> dict[str, Tensor]:
        """Run after the optimizer step and return metrics. Not called for non-finite steps. Collective."""
        ...


class NonFiniteError(RunError):
    """The loss or the gradient norm is not finite, or the step has no label tokens.

    Raised on all ranks before the optimizer changes a parameter. `rows` are the ids (`Batch.row_ids_B`) of the rows of
    all ranks with non-finite log-probs. If all log-probs are finite, they are all rows of the step.
    """

    code = "non_finite"

    def __init__(self, message: str, rows: Sequence[int], fix: str):
        super().__init__(f"{message}; rows {', '.join(map(str, rows))}", fix=fix)
        self.reason, self.rows = message, tuple(rows)

    def located(self, step: int, describe: Callable[[int], str]) -> RunError:
        """Return an error that names the step, and file and line of each row."""
        rows = "; ".join(describe(row) for row in self.rows)
        return RunError(f"step {step}: {self.reason}: {rows}", code=self.code, fix=self.fix)


def train_step(
    stages: Stages,
    batches: Sequence[Batch],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    max_grad_norm: float | None,
    hooks: Sequence[StepHook] = (),
    stop_signal: Callable[[], int] = lambda: 0,
    progress: Callable[[str], None] = lambda where: None,
    busy_seconds: Callable[[], float] = lambda: 0.0,
    data_seconds: float = 0.0,
) -> StepResult:
    """Run one optimizer step over the microbatches of this rank. All ranks must pass the same number of microbatches.

    1. Sum the denominator of the loss over ranks. Each microbatch is divided by it once, and everything else is a sum.
    2. Forward and backward of all microbatches.
    3. Clip the gradient norm.
    4. All-reduce loss, sums of the objective and stop signals. Objectives with extrema need one more collective.
    5. Synchronize with the host once, to detect non-finite steps.
    6. Optimizer step. If its kernel can skip the update on the device, it is launched before the synchronization.
       The host then prepares the next step while the kernels run.

    Args:
        stages, batches: model parts and pipeline schedule of this rank, and its microbatches.
        objective, optimizer: the loss, and the optimizer of `stages.parts`.
        max_grad_norm: maximum gradient norm, or None to disable clipping.
        hooks: called before the first forward and after the optimizer step.
        stop_signal: returns a number from 0 to 31, called after backward. All ranks receive the maximum.
        progress: receives a short description of the current phase. Must not block.
        busy_seconds, data_seconds: returns the seconds that this rank computed; those that it waited for `batches`.

    Raises:
        NonFiniteError: on all ranks, if the loss or the gradient norm is not finite. No parameter has changed.
    """
    batches = [batch.to(mesh.device) for batch in batches]
    # Known before the first forward: every microbatch divides by the denominator of the whole step, over all ranks.
    weight, batches = with_denominators(objective, batches, lambda local: mesh.sum_over(mesh.dp, local))
    tally = MetricAccumulator(objective, mesh.device)
    for hook in hooks:
        hook.begin(batches)
    progress("the first forward")
    loss_of = _measured_loss(objective, weight, tally, progress, len(batches))
    local_loss = stages.forward_backward(batches, loss_of, request_of(objective))
    progress("the gradient norm")
    grad_norm = clip_grad_norm_(stages.parts, max_grad_norm, mesh)
    # One vector of scalars, so that one collective reduces all of them.
    # Collectives cost latency, not bytes, at this size.
    local = torch.cat([torch.stack([local_loss, _is_bad(grad_norm)]), tally.sums()])
    here = (busy_seconds(), data_seconds)
    loss, num_bad_norms, sums, noticed, seconds = _over_all_ranks(local, stop_signal(), here, mesh)
    is_good = loss.isfinite() & (num_bad_norms == 0)
    answer = _update_if(is_good, noticed, optimizer, mesh.device)
    if answer < 0:
        _raise_non_finite(loss, grad_norm, weight, stages, batches)
    metrics = tally.result(sums, mesh)
    for hook in hooks:
        metrics |= hook.finish()
    return StepResult(loss, grad_norm, weight, metrics, int(answer), seconds[0], seconds[1])


def _measured_loss(
    objective: Objective, weight: Tensor, tally: MetricAccumulator, progress: Callable[[str], None], num_batches: int
) -> LossFn:
    """Return the loss of a microbatch, divided by the global `weight`. Every call also adds to `tally`."""
    # Example: rank 0 has 300 label tokens and rank 1 has 100. Both divide their loss sums by 400. Gradients are then
    # summed, which gives the mean over all tokens, and not the mean of the ranks' means.
    seen = itertools.count(1)
    divisor = weight.float() if weight.is_floating_point() else weight  # float64 would make the loss float64

    def loss_of(output: HeadOutput, batch: Batch) -> Tensor:
        progress(f"microbatch {next(seen)} of {num_batches}")
        tally.add(output, batch)
        return objective(output, batch) / divisor

    return loss_of


def _update_if(is_good: Tensor, noticed: Tensor, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Update the parameters if `is_good`, and clear gradients. Return the stop signal, or -1 without an update."""
    # One number answers two questions on the host: -1 is a non-finite step, otherwise it is the stop signal.
    arriving = _ToHost(torch.where(is_good, noticed, -1.0))
    # Queued before the host waits, so the device does not idle during the synchronization.
    launched = step_if_finite(~is_good, optimizer, device)
    answer = wait_for_device(arriving)
    if answer >= 0:
        if not launched:
            optimizer.step()
        optimizer.zero_grad()
    return answer


class _ToHost:
    """Asynchronous copy of one number to the host. It waits only for work that was queued before it."""

    def __init__(self, value: Tensor):
        self.number = value
        self.copied: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self.number = value.to("cpu", non_blocking=True)  # torch uses pinned memory
            self.copied = torch.cuda.Event()
            self.copied.record()


def wait_for_device(arriving: _ToHost) -> float:
    """Synchronize with the device. A stack trace that ends here waits for the device or for other ranks."""
    if arriving.copied is not None:
        arriving.copied.synchronize()
    return arriving.number.item()


def _is_bad(grad_norm: Tensor) -> Tensor:
    return (~grad_norm.isfinite()).float()


def _over_all_ranks(
    local: Tensor, stop_signal: int, seconds_here: tuple[float, float], mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reduce the scalars of a step over all ranks in one collective.

    Tensor- and context-parallel copies of a loss contribute zeros, so that each loss counts once. Stop signals are
    one-hot, so that a sum yields their maximum.

    Args:
        local: loss, indicator of a non-finite norm, and sums of the objective of this rank.
        seconds_here: busy seconds of this rank, and seconds that it waited for data.

    Returns:
        Loss, number of non-finite norms, sums of the objective, maximum stop signal, and `seconds_here` of all ranks,
        (2, ranks).
    """
    world_size = dist.get_world_size()
    is_copy = mesh.tp.get_local_rank() > 0 or mesh.cp.get_local_rank() > 0
    # Example: signals 0, 15 and 0 of three ranks sum to 2 at index 0 and 1 at index 15. The maximum is 15.
    stop_signals = torch.zeros(_NUM_SIGNALS, dtype=local.dtype, device=local.device)
    stop_signals[stop_signal] = 1
    seconds = torch.zeros(2, world_size, dtype=local.dtype, device=local.device)
    seconds[0, dist.get_rank()], seconds[1, dist.get_rank()] = seconds_here
    total = torch.cat([torch.zeros_like(local) if is_copy else local.detach(), stop_signals, seconds.flatten()])
    if world_size > 1:
        dist.all_reduce(total)
    (loss, num_bad_norms), rest = total[:2].unbind(), total[2:]
    num_sums = rest.numel() - _NUM_SIGNALS - seconds.numel()
    sums, stop_signals, everywhere = rest.split([num_sums, _NUM_SIGNALS, seconds.numel()])
    noticed = (stop_signals.sign() * torch.arange(_NUM_SIGNALS, device=local.device)).amax()
    return loss, num_bad_norms, sums, noticed, everywhere.view_as(seconds)


def _raise_non_finite(
    loss: Tensor, grad_norm: Tensor, weight: Tensor, stages: Stages, batches: Sequence[Batch]
) -> NoReturn:
    """Raise NonFiniteError with the suspect rows. Collective: all ranks decide alike, because the loss is summed."""
    if not bool(weight):
        reason = "nothing to train on: the step has no label tokens"
    elif not bool(loss.isfinite()):
        reason = f"the loss is {loss.item()}"
    else:
        reason = f"the gradient norm is {grad_norm.item()}"
    raise NonFiniteError(
        f"{reason}. Stopped before the optimizer step",
        _suspects(stages, batches),
        fix="inspect these rows, or lower optimizer.lr and resume from the last checkpoint",
    )


def _suspects(stages: Stages, batches: Sequence[Batch]) -> list[int]:
    """Return the rows of all ranks with non-finite log-probs in a new forward, else all rows. Collective."""
    # A second forward, only after a failure. A normal step stores no log-probs per row.
    bad_B = stages.forward(batches, lambda output, batch: ~output.logprobs_BT.isfinite().all(1))
    row_ids = torch.cat([batch.row_ids_B for batch in batches])
    bad = torch.cat(bad_B)
    everywhere: list[tuple[list[int], list[int]]] = [([], []) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, (row_ids.tolist(), row_ids[bad].tolist()))
    rows = {row for of_rank, _ in everywhere for row in of_rank}
    bad_rows = {row for _, of_rank in everywhere for row in of_rank}
    return sorted(bad_rows or rows)
