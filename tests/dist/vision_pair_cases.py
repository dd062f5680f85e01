"""Preference pairs with pictures under layouts, reference model included, against the composite in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.models.attention.packed import register_packed_attention
from automodel_cli.models.vision.probe import small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.objectives.dpo import DPO
from automodel_cli.parity.compare import Errors, GradientRecorder, step_errors
from automodel_cli.parity.reference import Reference
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage
from automodel_cli.run.frozen_models.reference_model import batch_logprobs
from automodel_cli.training.stages import Stages
from automodel_cli.training.step import train_step
from tests.dist.vision_cases import Case, by_composite_names
from tests.vision import config_of, model_of, processor_of
from tests.vision_pairs import BETA, MICROBATCHES, batch_of, loss_of_composite, reference_model


def reference(kind: str, dtype: torch.dtype) -> Reference:
    """Loss and gradients of one step, by the names of the composite."""
    loss, gradients = loss_of_composite(kind, FamilyProcessor(processor_of(kind), config_of(kind)), dtype)
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    return Reference(loss, norm.item(), {name: gradient.float() for name, gradient in gradients.items()})


def compare(rank: int, world: int, kind: str, cases: Sequence[Case], *, shared: bool = True) -> list[Errors]:
    """Run one step of each case on these ranks. The list of rank 0 is the verdict."""
    register_packed_attention()
    exact = reference(kind, torch.float64)
    expected = replace(exact, rounding=exact.error_of(reference(kind, torch.float32)))
    return [_errors(kind, case, expected, world, shared) for case in cases]


def _errors(kind: str, case: Case, expected: Reference, world: int, shared: bool) -> Errors:
    mesh = build_mesh(case.mesh.resolve(world), "cpu")
    processor = FamilyProcessor(processor_of(kind), config_of(kind))
    count = len(MICROBATCHES) // mesh.dp_size
    rows = MICROBATCHES[mesh.dp_rank * count :][:count]
    multiple = 2 if kind.endswith("moe") else 1
    batches = [batch_of(of, processor, shared=shared, multiple_of=multiple) for of in rows]
    frozen = _stages(reference_model(kind), case, mesh, processor, count, frozen=True)
    logprobs = batch_logprobs(frozen, batches, mesh.device)
    batches = [batch.with_columns(ref_logprobs_BT=of) for batch, of in zip(batches, logprobs, strict=True)]
    whole = model_of(kind)
    stages = _stages(whole, case, mesh, processor, count)
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, batches, DPO(beta=BETA), recorder, mesh, max_grad_norm=None)
    return step_errors(expected, result, by_composite_names(recorder.gradients, small_part(whole), expected))


def _stages(
    whole: torch.nn.Module, case: Case, mesh: Mesh, processor: FamilyProcessor, count: int, *, frozen: bool = False
) -> Stages:
    part = small_part(whole).train()
    if frozen:
        part.requires_grad_(False)
    return build_stages(
        part,
        mesh,
        case.pipeline,
        case.parallelizer,
        num_microbatches=count,
        picture_layers=lambda: layers_of_first_stage(whole.config, processor),
    )
