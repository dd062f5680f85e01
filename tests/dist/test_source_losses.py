"""Loss weights and losses of datasets under every parallelism, against their definition in one process, in float64.

One optimizer step over packed rows of three datasets. The definition runs the library's model on single documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import LOSS_WEIGHTS, SOURCES
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.objectives.sources import with_source_losses
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import Case
from automodel_cli.parity.compare import GradientRecorder
from automodel_cli.parity.gradient_errors import full_gradients, gradient_errors, missing, worst_of
from automodel_cli.pipelining import build_stages
from automodel_cli.training.step import train_step
from automodel_cli.training.validate import validate
from tests import tiny
from tests.dist.harness import launch
from tests.dist.test_composed import row
from tests.rounding import tolerance

pytestmark = pytest.mark.slow

NAMES, WEIGHTS = ("web", "code", "sums"), (1.0, 0.25, 3.0)
COUNT = 4


@dataclass
class Numbers:
    """Loss, losses of the datasets in the order of `NAMES`, and gradients."""

    loss: float
    losses: list[float]
    gradients: dict[str, Tensor]


def batches_of_sources() -> list[Batch]:
    """Rows of three datasets: microbatch i has the datasets i % 3 and (i + 1) % 3, its first row none in the last."""
    out = []
    for i, batch in enumerate(step_batches(packed=True, count=COUNT)):
        sources_B = torch.tensor([i % 3 if i < COUNT - 1 else -1, (i + 1) % 3])
        weights_B = torch.tensor([*WEIGHTS, 1.0])[sources_B]
        out.append(batch.with_columns(**{SOURCES: sources_B, LOSS_WEIGHTS: weights_B}))
    return out


def by_definition(model) -> Numbers:
    model = model.double()
    sums, weights, losses, labels = torch.zeros((), dtype=torch.float64), 0.0, [0.0] * 3, [0] * 3
    for batch in batches_of_sources():
        ids_N, labels_N = batch.input_ids_BT.flatten(), batch.labels_BT.flatten()
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            source = int(batch.extra[SOURCES][start // batch.shape[1]])
            logits = model(ids_N[None, start:end], use_cache=False).logits[0]
            nll = F.cross_entropy(logits, labels_N[start:end], ignore_index=-100, reduction="sum")
            count, weight = int((labels_N[start:end] != -100).sum()), 1.0 if source < 0 else WEIGHTS[source]
            sums, weights = sums + weight * nll, weights + weight * count
            if source >= 0:
                losses[source] += nll.item()
                labels[source] += count
    (sums / weights).backward()
    means = [loss / count for loss, count in zip(losses, labels, strict=True)]
    return Numbers((sums / weights).item(), means, full_gradients([model]))


def run(rank: int, world: int, folder: str, want: Numbers, rows: Sequence[Case]) -> list[dict[str, float]]:
    """Relative errors of each layout."""
    return [_run(folder, want, r) for r in rows]


def _run(folder: str, want: Numbers, r: Case) -> dict[str, float]:
    mesh = build_mesh(r.mesh.resolve(dist.get_world_size()), "cpu")
    count = COUNT // mesh.dp_size
    config, objective = ModelConfig(pretrained=folder), with_source_losses(SFT(), NAMES)
    stages = build_stages.build_stages(build_part(config), mesh, r.pipeline, r.parallelizer, num_microbatches=count)
    for part in stages.parts:
        load_weights(part, config, device="cpu", seed=0)
    recorder = GradientRecorder(*stages.parts)
    mine = batches_of_sources()[mesh.dp_rank * count :][:count]
    result = train_step(stages, mine, objective, recorder, mesh, max_grad_norm=None)
    validated = validate(stages, mine, objective, mesh)
    everywhere: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, gradient_errors(want.gradients, recorder.gradients))
    everywhere.append(missing(want.gradients, {name for of_rank in everywhere for name in of_rank}))
    errors = {"loss": _off(result.loss, want.loss), "val_loss": _off(validated.loss, want.loss)}
    for name, loss in zip(NAMES, want.losses, strict=True):
        errors[f"loss_{name}"] = _off(result.metrics[f"loss_{name}"], loss)
        errors[f"val_loss_{name}"] = _off(validated.metrics[f"loss_{name}"], loss)
    return {**errors, "gradient": worst_of(everywhere)[1]}


def _off(got: Tensor, want: float) -> float:
    return abs(got.item() - want) / want


def test_weighted_losses_of_datasets_do_not_depend_on_the_layout(tmp_path):
    model = tiny.build_hf("llama")
    model.save_pretrained(tmp_path)
    rows = [replace(r, num_microbatches=COUNT) for r in (row(dp=2), row(pp=2), row(cp=2), row(tp=2))]
    for r, errors in zip(rows, launch(run, 2, str(tmp_path), by_definition(model), rows), strict=True):
        assert max(errors.values()) < tolerance(), (r, errors)
