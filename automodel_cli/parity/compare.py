"""One real optimizer step on a mesh of ranks against one process: what `automodel verify` and the test suite share.

`run_rows` is what every rank runs; each rank compares the gradients that it holds, so copies that drift apart show, and
rank 0 judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.base import request_of
from automodel_cli.parity import lora_reference, value_head
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import Case
from automodel_cli.parity.gradient_errors import full_gradients, gradient_errors, missing, worst_of
from automodel_cli.parity.reference import Original, Reference
from automodel_cli.pipelining import build_stages as pipelining_build_stages
from automodel_cli.training.stages import Stages
from automodel_cli.training.step import StepResult, train_step

Fault = Callable[[list[Batch]], list[Batch]]
"""Breaks the side under test only: gets the microbatches of this rank, and may patch what it likes."""

TIMES_ROUNDING = 8.0
"""How many times the float32 error of one process a layout may be off by.

A layout adds the same numbers in another order. Errors of layouts that are right were 0.1 to 4 times those of one
process with scalar, AVX2 and AVX-512 kernels. A mistake costs 1e-3 of a gradient, over 1,000 times as much.
"""


@dataclass(frozen=True)
class Errors:
    """Relative to the reference: loss, gradient norm, and the worst gradient (of `name`) over the largest gradient.

    `rounding`: the worst error of one process in float32 on this machine (`Reference.rounding`).
    """

    loss: float
    grad_norm: float
    gradient: float
    name: str = ""
    rounding: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.loss, self.grad_norm, self.gradient)

    def within(self, tolerance: float, of_gradient: float | None = None) -> bool:
        """`of_gradient`: another bound for single gradients."""
        of_gradient = tolerance if of_gradient is None else of_gradient
        return self.loss <= tolerance and self.grad_norm <= tolerance and self.gradient <= of_gradient  # nan is not

    def within_rounding(self) -> bool:
        """Return whether every error is at most `TIMES_ROUNDING` times that of one process in float32."""
        return self.within(TIMES_ROUNDING * self.rounding)


@dataclass(frozen=True)
class Refused:
    """The layout was refused, as a run would be, with this reason."""

    reason: str


class GradientRecorder(torch.optim.Optimizer):
    """An optimizer that keeps the gradients it was given, in full, and changes nothing."""

    def __init__(self, *parts: nn.Module):
        super().__init__([param for part in parts for param in part.parameters()], {})
        self.parts = parts
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.gradients = full_gradients(self.parts)


def run_rows(
    rank: int, world: int, original: Original, rows: Sequence[Case], sabotage: Fault | None = None
) -> list[Errors | Refused]:
    """Every row on these ranks, one after another. Rank 0's list is the verdict; other ranks' errors are their own."""
    return [run_row(original, row, sabotage) for row in rows]


def run_row(original: Original, row: Case, sabotage: Fault | None = None) -> Errors | Refused:
    """One row, on all ranks of the process group. Collective."""
    try:
        mesh = build_mesh(row.mesh.resolve(dist.get_world_size()), "cpu")
        every = step_batches(packed=row.packed, count=row.num_microbatches)
        count = len(every) // mesh.dp_size
        mine = every[mesh.dp_rank * count :][:count]
        batches = mine if sabotage is None else sabotage(mine)
        stages = build_parity_stages(original, row, mesh)
    except ConfigError as error:
        return Refused(str(error))
    want = original.reference(packed=row.packed, count=row.num_microbatches)
    if row.lora is not None:
        parts = [part for part in stages.parts if isinstance(part, ModelPart)]
        want = lora_reference.reference_of(want, lora_reference.put_in(parts))
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, batches, row.objective, recorder, mesh, max_grad_norm=None)
    return step_errors(want, result, recorder.gradients)


def build_parity_stages(original: Original, row: Case, mesh: Mesh) -> Stages:
    """The way a recipe builds them: meta, cut, parallelised, then filled from the saved model."""
    config = replace(original.model_config(), lora=row.lora, fp8=row.fp8)
    count = row.num_microbatches // mesh.dp_size
    stages = pipelining_build_stages.build_stages(
        build_part(config, request=request_of(row.objective)),
        mesh,
        row.pipeline,
        row.parallelizer,
        num_microbatches=count,
    )
    for local in stages.parts:
        assert isinstance(local, ModelPart)
        device = row.parallelizer.parameter_device(mesh.device)
        load_weights(local, config, device=device, buffer_device=mesh.device, seed=0)
        value_head.fill_value_head(local)
    return stages


def step_errors(want: Reference, result: StepResult, got: dict[str, Tensor]) -> Errors:
    """Errors of a step, the worst over all ranks. Collective: a gradient must be on some rank, and right on each."""
    everywhere: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, gradient_errors(want.gradients, got))
    everywhere.append(missing(want.gradients, {name for of_rank in everywhere for name in of_rank}))
    name, gradient = worst_of(everywhere)
    return Errors(
        loss=abs(result.loss.item() - want.loss) / abs(want.loss),
        grad_norm=abs(result.grad_norm.item() - want.grad_norm) / want.grad_norm,
        gradient=gradient,
        name=name,
        rounding=want.rounding,
    )
