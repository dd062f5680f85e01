"""The one optimizer step, for every objective, parallelizer and pipeline."""

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
from automodel_cli.training.stages import Stages
from automodel_cli.training.torch_compat import step_if_finite

_NUM_SIGNALS = 32


@dataclass(frozen=True)
class StepResult:
    """Scalars of the whole step, equal on every rank, on the mesh's device until somebody logs them."""

    loss: Tensor
    """fp32: sum of the objective / `weight`."""
    grad_norm: Tensor
    """float64, before clipping."""
    weight: Tensor
    """What the loss was divided by: label tokens, pairs or sequences."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """What the objective measures besides (see `MeasuredObjective`)."""
    stop_signal: int = 0
    """The largest `stop_signal` that a rank brought: on the host, where the step is waited for anyway."""
    busy_seconds: Tensor = field(default_factory=lambda: torch.zeros(1))
    """(ranks,): the `busy_seconds` that each brought."""


class StepHook(Protocol):
    """What else happens once per optimizer step (statistics of routers, and what follows from them)."""

    def begin(self, batches: Sequence[Batch]) -> None:
        """Before the first forward, with this rank's microbatches on the device. Collective."""
        ...

    def finish(self) -> dict[str, Tensor]:
        """After the optimizer's step, which a non-finite one never reaches: more `StepResult.metrics`. Collective."""
        ...


class NonFiniteError(RunError):
    """Loss or gradient is inf or nan, or the step has nothing to train on. Raised on every rank, before the optimizer
    has touched a parameter.

    `rows` are the ids of the rows (`Batch.row_ids_B`, of all ranks) whose log-probs are not finite, or, where all
    are, every row of the step.
    """

    code = "non_finite"

    def __init__(self, message: str, rows: Sequence[int], fix: str):
        super().__init__(f"{message}; rows {', '.join(map(str, rows))}", fix=fix)
        self.reason, self.rows = message, tuple(rows)

    def located(self, step: int, describe: Callable[[int], str]) -> RunError:
        """The same for the user: with the step and the rows by file and line."""
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
) -> StepResult:
    """One optimizer step over this rank's microbatches; every rank must bring equally many.

    `stop_signal` gives a number, 0 to 31, for all ranks to know after the step (a signal that this one received). It is
    asked after backward. `progress` hears how far the step is, without waiting for anything; `busy_seconds` is
    what this rank brings to `StepResult.busy_seconds`.

    The denominator of the loss is summed over ranks before the first forward, so each microbatch is divided once, by
    the right number, and everything after that is a sum. Three small collectives: weight, gradient norm, loss (with
    the sums that the objective measures, and the stop_signal; one more where it also measures extrema). One host
    synchronisation, to refuse a non-finite step (NonFiniteError, on all ranks alike). The optimizer is launched before
    it where its kernel can be told on the device to change nothing, else after it. The wait does not cover its kernels:
    the host prepares the next step while they run.
    """
    batches = [batch.to(mesh.device) for batch in batches]
    weight, batches = with_denominators(objective, batches, lambda local: mesh.sum_over(mesh.dp, local))
    tally = MetricAccumulator(objective, mesh.device)
    for hook in hooks:
        hook.begin(batches)

    seen = itertools.count(1)
    progress("the first forward")

    def loss_of(output: HeadOutput, batch: Batch) -> Tensor:
        progress(f"microbatch {next(seen)} of {len(batches)}")
        tally.add(output, batch)
        return objective(output, batch) / weight

    local_loss = stages.forward_backward(batches, loss_of, request_of(objective))
    progress("the gradient norm")
    grad_norm = clip_grad_norm_(stages.parts, max_grad_norm, mesh)
    local = torch.cat([torch.stack([local_loss, _is_bad(grad_norm)]), tally.sums()])
    loss, num_bad_norms, sums, noticed, seconds = _over_all_ranks(local, stop_signal(), busy_seconds(), mesh)
    is_good = loss.isfinite() & (num_bad_norms == 0)
    arriving = _ToHost(torch.where(is_good, noticed, -1.0))
    launched = step_if_finite(~is_good, optimizer, mesh.device)
    answer = wait_for_device(arriving)
    if answer < 0:
        _refuse(loss, grad_norm, weight, stages, batches)
    if not launched:
        optimizer.step()
    optimizer.zero_grad()
    metrics = tally.result(sums, mesh)
    for hook in hooks:
        metrics |= hook.finish()
    return StepResult(
        loss=loss, grad_norm=grad_norm, weight=weight, metrics=metrics, stop_signal=int(answer), busy_seconds=seconds
    )


class _ToHost:
    """One number on its way to the host. The copy waits for the work queued so far; work queued later does not delay
    it.
    """

    def __init__(self, value: Tensor):
        self.number = value
        self.copied: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self.number = value.to("cpu", non_blocking=True)  # torch takes pinned memory for it
            self.copied = torch.cuda.Event()
            self.copied.record()


def wait_for_device(arriving: _ToHost) -> float:
    """The one host synchronisation of a step: a stack that ends here waits for the device, and so for other ranks."""
    if arriving.copied is not None:
        arriving.copied.synchronize()
    return arriving.number.item()


def _is_bad(grad_norm: Tensor) -> Tensor:
    return (~grad_norm.isfinite()).float()


def _over_all_ranks(
    local: Tensor, stop_signal: int, busy_seconds: float, mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`local` summed over the axes whose losses add up, as three tensors (loss, number of bad norms, the objective's
    sums), then the largest stop signal of any rank, then the own seconds of each rank. One collective over all ranks,
    so that all agree; those that hold a copy of another's loss add nothing to it.
    """
    world_size = dist.get_world_size()
    is_copy = mesh.tp.get_local_rank() > 0 or mesh.cp.get_local_rank() > 0
    stop_signals = torch.zeros(_NUM_SIGNALS, dtype=local.dtype, device=local.device)
    stop_signals[stop_signal] = 1
    seconds = torch.zeros(world_size, dtype=local.dtype, device=local.device)
    seconds[dist.get_rank()] = busy_seconds
    total = torch.cat([torch.zeros_like(local) if is_copy else local.detach(), stop_signals, seconds])
    if world_size > 1:
        dist.all_reduce(total)
    (loss, num_bad_norms), rest = total[:2].unbind(), total[2:]
    sums, stop_signals, seconds = rest.split([rest.numel() - _NUM_SIGNALS - world_size, _NUM_SIGNALS, world_size])
    noticed = (stop_signals.sign() * torch.arange(_NUM_SIGNALS, device=local.device)).amax()
    return loss, num_bad_norms, sums, noticed, seconds


def _refuse(loss: Tensor, grad_norm: Tensor, weight: Tensor, stages: Stages, batches: Sequence[Batch]) -> NoReturn:
    """Name what went wrong and the rows. Collective: every rank is here, because all hold the same summed loss."""
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
    """Rows of all ranks with a non-finite log-prob in a fresh forward; all rows of the step if there is none.
    Collective.
    """
    bad_B = stages.forward(batches, lambda output, batch: ~output.logprobs_BT.isfinite().all(1))
    row_ids = torch.cat([batch.row_ids_B for batch in batches])
    bad = torch.cat(bad_B)
    everywhere: list[tuple[list[int], list[int]]] = [([], []) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, (row_ids.tolist(), row_ids[bad].tolist()))
    rows = {row for of_rank, _ in everywhere for row in of_rank}
    bad_rows = {row for _, of_rank in everywhere for row in of_rank}
    return sorted(bad_rows or rows)
