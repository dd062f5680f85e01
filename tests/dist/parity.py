"""One optimizer step on many ranks against the dumbest reference: the library's eager model, one document at a time.

Everything here is importable by forked ranks. `compare` is what a rank runs; `Errors` is what the tests judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.config import FSDP2Config, MixedPrecision, ParallelizerConfig
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.attention import PACKED, register
from automodel_cli.models.head import HeadKind
from automodel_cli.models.part import ModelPart
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import StepResult, train_step
from tests import tiny

TOKENS = 24
PACKED_ROWS = ((5, 9, 10), (17, 7))  # document lengths of the two rows of a microbatch
PADDED_ROWS = ((11, 13), (20, 4))  # a document, then padding
FP32 = MixedPrecision(param_dtype=None, reduce_dtype=None)
FSDP2 = FSDP2Config(mp_policy=FP32)
Sabotage = Callable[[list[Batch]], list[Batch]]


@dataclass(frozen=True)
class Case:
    """One row of the parity matrix."""

    family: str = "llama"
    packed: bool = True
    num_microbatches: int = 3
    mesh: MeshConfig = field(default_factory=MeshConfig)
    config: ParallelizerConfig | None = FSDP2  # None: SingleStage on the plain part
    attention: str = PACKED


@dataclass(frozen=True)
class Errors:
    """Relative to the reference: loss, gradient norm, and the worst gradient over the largest gradient."""

    loss: float
    grad_norm: float
    gradient: float

    def within(self, tolerance: float) -> bool:
        return max(self.loss, self.grad_norm, self.gradient) <= tolerance


class Recorder(torch.optim.Optimizer):
    """An optimizer that keeps the gradients it was given, in full, and changes nothing."""

    def __init__(self, part: nn.Module):
        super().__init__(part.parameters(), {})
        self.part = part
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure=None):
        self.gradients = {ModelPart.hub_name(n): g for n, g in tiny.gradients(self.part).items()}


def microbatch(index: int, packed: bool, all_ignored: bool = False) -> Batch:
    """Two rows that no other index has, with label masks as uneven as `index` is large."""
    lengths = PACKED_ROWS if packed else PADDED_ROWS
    rows = [
        [tiny.token_row(n, seed=100 * index + 10 * r + d) for d, n in enumerate(row)] for r, row in enumerate(lengths)
    ]
    batch = tiny.packed_batch(rows)
    labels_BT = batch.labels_BT.clone()
    labels_BT[:, : index % 8] = IGNORE_INDEX
    if not packed:
        for r, (document, _) in enumerate(lengths):
            labels_BT[r, document:] = IGNORE_INDEX
    if all_ignored:
        labels_BT[:] = IGNORE_INDEX
    return replace(batch, labels_BT=labels_BT, row_ids_B=torch.arange(2) + 2 * index)


def step_batches(case: Case, dp_size: int) -> list[list[Batch]]:
    """Microbatches of every rank. With several of them, one holds no label at all: its ranks must still take part."""
    count = case.num_microbatches
    return [
        [
            microbatch(r * count + i, case.packed, all_ignored=count > 1 and r == dp_size - 1 and i == 0)
            for i in range(count)
        ]
        for r in range(dp_size)
    ]


def reference(family: str, batches: Sequence[Batch]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and gradients: every document alone through the unmodified eager model, in this process."""
    model = tiny.build_hf(family)
    weight = sum(int(batch.num_label_tokens) for batch in batches)
    loss = torch.zeros(())
    for batch in batches:
        ids_N, labels_N = batch.input_ids_BT.flatten(), batch.labels_BT.flatten()
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            logits_TV = model(input_ids=ids_N[None, start:end], use_cache=False).logits[0]
            loss = loss - tiny.logprobs_of(logits_TV, labels_N[start:end]).sum() / weight
    loss.backward()
    gradients = tiny.gradients(model)
    norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
    return loss.item(), norm.item(), gradients


def tiny_part(family: str, attention: str = PACKED) -> ModelPart:
    register()
    model = tiny.build_hf(family)
    model.set_attn_implementation(attention)
    return ModelPart(model, HeadKind("plain"))


def one_step(case: Case, mesh: Mesh, batches: Sequence[Batch], max_grad_norm: float | None = None):
    """(StepResult, full gradients) of the real train_step."""
    part = tiny_part(case.family, case.attention)
    module = part if case.config is None else parallelize(part, mesh, case.config)
    stages, recorder = SingleStage(module), Recorder(part)
    result: StepResult = train_step(stages, batches, SFT(), recorder, mesh, max_grad_norm=max_grad_norm)
    return result, recorder.gradients


def compare(rank: int, world: int, cases: Sequence[Case], sabotage: Sabotage | None = None) -> list[Errors]:
    """Run every case on these ranks and measure it against one process; rank 0 judges.

    A sabotage breaks the training side only: it gets the microbatches of this rank and may patch what it likes.
    """
    errors = []
    for case in cases:
        mesh = build_mesh(case.mesh.resolve(world), "cpu")
        of_ranks = step_batches(case, mesh.dp_size)
        mine = of_ranks[mesh.dp_rank]
        result, got = one_step(case, mesh, mine if sabotage is None else sabotage(mine))
        if rank == 0:
            want_loss, want_norm, want = reference(case.family, [batch for batches in of_ranks for batch in batches])
            errors.append(
                Errors(
                    loss=abs(result.loss.item() - want_loss) / abs(want_loss),
                    grad_norm=abs(result.grad_norm.item() - want_norm) / want_norm,
                    gradient=tiny.gradient_error(want, got),
                )
            )
    return errors
