"""Data-parallel rows of the comparison in `automodel_cli.parity`, on models that are built rather than loaded.

Everything here is importable by forked ranks. `compare` is what a rank runs; `Errors` is what the tests judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.config import FSDP2Config, ParallelizerConfig
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.attention.packed import PACKED, register_packed_attention
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import microbatch
from automodel_cli.parity.cases import FP32
from automodel_cli.parity.compare import Errors, Fault, GradientRecorder, step_errors
from automodel_cli.parity.reference import Reference, exact_process
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import StepResult, train_step
from tests import tiny

FSDP2 = FSDP2Config(mp_policy=FP32)


@dataclass(frozen=True)
class Case:
    """One row of the parity matrix. `num_microbatches` is of each data-parallel rank."""

    family: str = "llama"
    packed: bool = True
    num_microbatches: int = 3
    mesh: MeshConfig = field(default_factory=MeshConfig)
    config: ParallelizerConfig | None = FSDP2  # None: SingleStage on the plain part
    attention: str = PACKED
    num_layers: int = tiny.NUM_LAYERS


def step_batches(case: Case, dp_size: int) -> list[list[Batch]]:
    """Microbatches of every rank. With several of them, one holds no label at all: its ranks must still take part."""
    count = case.num_microbatches
    return [
        [
            microbatch(r * count + i, packed=case.packed, all_ignored=count > 1 and r == dp_size - 1 and i == 0)
            for i in range(count)
        ]
        for r in range(dp_size)
    ]


def reference(family: str, batches: Sequence[Batch], **extra: Any) -> Reference:
    return exact_process(tiny.build_hf(family, **extra), batches, SFT())


def tiny_part(family: str, attention: str = PACKED, **extra: Any) -> ModelPart:
    register_packed_attention()
    model = tiny.build_hf(family, **extra)
    model.set_attn_implementation(attention)
    return ModelPart(model, HeadKind("plain"))


def one_step(case: Case, mesh: Mesh, batches: Sequence[Batch], max_grad_norm: float | None = None):
    """(StepResult, full gradients) of the real train_step."""
    part = tiny_part(case.family, case.attention, num_hidden_layers=case.num_layers)
    module = part if case.config is None else parallelize(part, mesh, case.config)
    stages, recorder = SingleStage(module), GradientRecorder(part)
    result: StepResult = train_step(stages, batches, SFT(), recorder, mesh, max_grad_norm=max_grad_norm)
    return result, recorder.gradients


def compare(rank: int, world: int, cases: Sequence[Case], sabotage: Fault | None = None) -> list[Errors]:
    """Run every case on these ranks and measure it against one process; rank 0's list is the verdict."""
    errors = []
    wanted: dict[tuple[str, bool, int, int, int], Reference] = {}
    for case in cases:
        mesh = build_mesh(case.mesh.resolve(world), "cpu")
        of_ranks = step_batches(case, mesh.dp_size)
        # rank 0 alone runs the reference, before a sabotage can touch it
        same = case.family, case.packed, case.num_microbatches, case.num_layers, mesh.dp_size
        if same not in wanted:
            want: list[Reference | None] = [None]
            if rank == 0:
                batches = [batch for batches in of_ranks for batch in batches]
                want = [reference(case.family, batches, num_hidden_layers=case.num_layers)]
            dist.broadcast_object_list(want)
            assert want[0] is not None
            wanted[same] = want[0]
        mine = of_ranks[mesh.dp_rank]
        result, got = one_step(case, mesh, mine if sabotage is None else sabotage(mine))
        errors.append(step_errors(wanted[same], result, got))
    return errors
