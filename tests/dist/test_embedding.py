"""InfoNCE on ranks and in stages: loss and every gradient of one large batch in one process, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedModel

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.embedding import CosineScore, EmbeddingObjective, InfoNCE
from automodel_cli.parity import lora_reference
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, GradientRecorder, build_parity_stages, step_errors
from automodel_cli.parity.gradient_errors import full_gradients
from automodel_cli.parity.reference import Original, Reference
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.run.embedding_gradients import with_gradients
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

ROLES = torch.tensor([0, 1, 2, 0, 1])  # of the documents of a microbatch: two rows
OBJECTIVES: dict[str, EmbeddingObjective] = {
    "infonce": InfoNCE(temperature=0.2, dimensions=[64, 16]),
    "mean": InfoNCE(temperature=0.2, pooling="mean"),
    "own negatives": InfoNCE(temperature=0.2, in_batch_negatives=False),
    "scored": CosineScore(),
}
FSDP2 = FSDP2Config(mp_policy=FP32)
STAGES = PipelineConfig(schedule="1f1b")
LAYOUTS = {
    "fsdp2": Case(MeshConfig(dp_size=2), FSDP2),
    "ddp": Case(MeshConfig(dp_size=2), DDPConfig()),
    "pp": Case(MeshConfig(dp_size=1, pp_size=2), FSDP2, STAGES),
    "tp": Case(MeshConfig(dp_size=1, tp_size=2), FSDP2),
    "cp": Case(MeshConfig(dp_size=1, cp_size=2), FSDP2),
    "lora": Case(MeshConfig(dp_size=2), FSDP2, lora=LoRAConfig(rank=4)),
}


def batches_of_step() -> list[Batch]:
    """Two queries a microbatch. One passage of the step occurs twice, and must not be its own negative."""
    batches = step_batches(packed=True, count=4)
    last = batches[3].input_ids_BT.clone()
    last[1, 15:] = batches[0].input_ids_BT[1, 15:]
    batches[3] = replace(batches[3], input_ids_BT=last)
    scores = [torch.linspace(-0.5, 0.9, 5) + 0.1 * i for i in range(4)]
    return [b.with_columns(roles_S=ROLES, scores_S=s) for b, s in zip(batches, scores, strict=True)]


def expected(model, objective: EmbeddingObjective, dtype: torch.dtype) -> Reference:
    """By the definitions, from one graph over all documents, each run alone."""
    model = model.to(dtype)
    model.zero_grad()
    texts, pooled, roles, scores = [], [], [], []
    for batch in batches_of_step():
        ids_N = batch.input_ids_BT.flatten()
        for document, (a, b) in enumerate(pairwise(batch.cu_seqlens.tolist())):
            hidden_TD = model.base_model(input_ids=ids_N[None, a:b], use_cache=False)[0][0]
            pooled.append(hidden_TD.mean(0) if objective.pooling == "mean" else hidden_TD[-1])
            texts.append(tuple(ids_N[a:b].tolist()))
            roles.append(int(ROLES[document]))
            scores.append(batch.extra["scores_S"][document].item())
    sizes = objective.dimensions or [len(pooled[0])]
    losses: list[Tensor] = []
    for size in sizes:
        vectors = [normalize(vector[:size], dim=0) for vector in pooled]
        for query in (i for i, role in enumerate(roles) if role == 0):
            if isinstance(objective, CosineScore):
                losses.append((vectors[query] @ vectors[query + 1] - scores[query]) ** 2)
                continue
            others = [i for i, role in enumerate(roles) if role > 0 and texts[i] != texts[query + 1]]
            if not objective.in_batch_negatives:
                others = [query + 2] if roles[query + 2 : query + 3] == [2] else []
            logits = torch.stack([vectors[query] @ vectors[i] / objective.temperature for i in (query + 1, *others)])
            losses.append(cross_entropy(logits[None], torch.tensor([0])))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: grad.double() for name, grad in full_gradients([model]).items()}
    norm = math.sqrt(sum(grad.square().sum().item() for grad in gradients.values()))
    return Reference(loss.item(), norm, {name: grad.float() for name, grad in gradients.items()})


def on_ranks(rank: int, world: int, original: Original, reference: Reference, rows: list[Case]) -> list[Errors]:
    return [_errors(original, reference, row) for row in rows]


def _errors(original: Original, reference: Reference, row: Case) -> Errors:
    mesh = build_mesh(row.mesh.resolve(2), "cpu")
    count = 4 // mesh.dp_size
    batches = batches_of_step()[mesh.dp_rank * count :][:count]
    stages = build_parity_stages(original, row, mesh)
    if row.lora is not None:
        parts = [part for part in stages.parts if isinstance(part, ModelPart)]
        reference = lora_reference.reference_of(reference, lora_reference.put_in(parts))
    recorder = GradientRecorder(*stages.parts)
    batches = with_gradients(stages, batches, row.objective, mesh)
    result = train_step(stages, batches, row.objective, recorder, mesh, max_grad_norm=None)
    return step_errors(reference, result, recorder.gradients)


@pytest.mark.parametrize("name", ["infonce", "mean", "own negatives", "scored"])
def test_loss_and_gradients_do_not_depend_on_the_layout(name: str, tmp_path: Path):
    _check(tiny.build_hf("llama", num_hidden_layers=2), OBJECTIVES[name], LAYOUTS, tmp_path)


def test_experts_on_ranks_train_the_same_embeddings(tmp_path: Path):
    layouts = {"ep2": Case(MeshConfig(dp_size=2, ep_size=2), FSDP2)}
    model = tiny.build_hf("qwen3_moe", num_hidden_layers=2)
    model.set_experts_implementation("eager")  # grouped GEMMs have no float64
    _check(model, OBJECTIVES["infonce"], layouts, tmp_path)


def _check(model: PreTrainedModel, objective: EmbeddingObjective, layouts: dict[str, Case], folder: Path) -> None:
    original = Original.write(folder, model, objective, kinds=(), counts=(4,))
    own = expected(model, objective, torch.float32)
    exact = expected(model, objective, torch.float64)
    exact = replace(exact, rounding=exact.error_of(own))
    rows = {name: replace(row, num_microbatches=4, objective=objective) for name, row in layouts.items()}
    for layout, errors in zip(rows, launch(on_ranks, 2, original, exact, list(rows.values())), strict=True):
        assert errors.within_rounding(), (layout, errors)
