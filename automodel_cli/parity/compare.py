"""Compares one optimizer step on a mesh of ranks with one process. Used by `automodel verify` and the tests.

All ranks execute `run_rows`. Each compares its own gradients, so diverging replicas are detected. Rank 0 has the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.parameter_patterns import EVERYTHING
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.freezing import freeze
from automodel_cli.models.model_part import model_parts
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
"""Breaks only the tested side: receives the local microbatches and may patch anything."""

TIMES_ROUNDING = 8.0
"""Bound of the error of a layout, in multiples of the fp32 error of one process.

Layouts add the same numbers in another order. Errors of correct layouts were 0.1 to 4 times those of one process with
scalar, AVX2 and AVX-512 kernels. A bug changes a gradient by 1e-3, over 1,000 times as much.
"""


@dataclass(frozen=True)
class Errors:
    """Relative errors of loss, gradient norm, and the worst gradient (`name`), relative to the largest gradient.

    rounding: worst fp32 error of one process on this machine (`Reference.rounding`).
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
        """Return whether the errors are within bounds. `of_gradient`: separate bound for single gradients."""
        of_gradient = tolerance if of_gradient is None else of_gradient
        return self.loss <= tolerance and self.grad_norm <= tolerance and self.gradient <= of_gradient  # nan is not

    def within_rounding(self) -> bool:
        """Return whether all_batches error is at most `TIMES_ROUNDING` times that of one process in float32."""
        return self.within(TIMES_ROUNDING * self.rounding)


@dataclass(frozen=True)
class Refused:
    """The layout is not supported, with the reason that a run would report."""

    reason: str


class GradientRecorder(torch.optim.Optimizer):
    """Optimizer that stores full gradients and does not change parameters."""

    def __init__(self, *parts: nn.Module):
        super().__init__([param for part in parts for param in part.parameters()], {})
        self.parts = parts
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.gradients = full_gradients(self.parts)


def run_rows(
    rank: int, world: int, original: Original, rows: Sequence[Case], sabotage: Fault | None = None
) -> list[Errors | Refused]:
    """Run every case on these ranks in order. The list of rank 0 is the result."""
    return [run_row(original, row, sabotage) for row in rows]


def run_row(original: Original, row: Case, sabotage: Fault | None = None) -> Errors | Refused:
    """Run one case on all ranks of the process group. Collective."""
    try:
        mesh = build_mesh(row.mesh.resolve(dist.get_world_size()), "cpu")
        all_batches = step_batches(
            packed=row.packed, count=row.num_microbatches, num_outputs=request_of(row.objective).scores
        )
        count = len(all_batches) // mesh.dp_size
        local_batches = all_batches[mesh.dp_rank * count :][:count]
        batches = local_batches if sabotage is None else sabotage(local_batches)
        stages = build_parity_stages(original, row, mesh)
    except ConfigError as error:
        return Refused(str(error))
    expected = original.reference(packed=row.packed, count=row.num_microbatches)
    if row.lora is not None:
        parts = model_parts(stages.parts)
        adapters = lora_reference.put_in(parts)
        expected = lora_reference.reference_of(expected, adapters, _trained(original, row))
    elif row.selection != EVERYTHING:
        expected = expected.of_names(_trained(original, row))
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, batches, row.objective, recorder, mesh, max_grad_norm=None)
    return step_errors(expected, result, recorder.gradients)


def _trained(original: Original, row: Case) -> set[str]:
    """Return the names of the parameters that a case trains."""
    config = replace(original.model_config(), lora=row.lora)
    part = build_part(config, request=request_of(row.objective))
    freeze(part, row.selection)
    return {part.hub_name(name) for name, param in part.named_parameters() if param.requires_grad}


def build_parity_stages(original: Original, row: Case, mesh: Mesh) -> Stages:
    """Build stages like a recipe: meta, split, parallelize, load the saved model."""
    config = replace(original.model_config(), lora=row.lora, fp8=row.fp8, qat=row.qat)
    count = row.num_microbatches // mesh.dp_size
    part = build_part(config, request=request_of(row.objective))
    freeze(part, row.selection)
    stages = pipelining_build_stages.build_stages(
        part,
        mesh,
        row.pipeline,
        row.parallelizer,
        num_microbatches=count,
    )
    for local in model_parts(stages.parts):
        device = row.parallelizer.parameter_device(mesh.device)
        load_weights(local, config, device=device, buffer_device=mesh.device, seed=0)
        value_head.fill_value_head(local)
    return stages


def step_errors(expected: Reference, result: StepResult, got: dict[str, Tensor]) -> Errors:
    """Return the errors of a step, the worst over all ranks. Collective. Each gradient must exist on some rank."""
    rank_errors: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(rank_errors, gradient_errors(expected.gradients, got))
    rank_errors.append(missing(expected.gradients, {name for errors_of_rank in rank_errors for name in errors_of_rank}))
    name, gradient = worst_of(rank_errors)
    return Errors(
        loss=abs(result.loss.item() - expected.loss) / abs(expected.loss),
        grad_norm=abs(result.grad_norm.item() - expected.grad_norm) / expected.grad_norm,
        gradient=gradient,
        name=name,
        rounding=expected.rounding,
    )
