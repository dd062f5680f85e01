"""Every data-parallel layout against one process, on loss, gradient norm and every gradient, packed and padded, with
one and several microbatches whose label masks are uneven over ranks. Then the sabotages that must not pass.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from automodel_cli.distributed.config import CPUOffload, DDPConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist import mutations
from tests.dist.harness import launch
from tests.dist.parity import FSDP2, Case, compare, step_batches
from tests.marks import slow

CLEARLY_WRONG = 1e-4

LAYOUTS = {
    "one process": (1, MeshConfig(), None),
    "fsdp2 x1": (1, MeshConfig(), FSDP2),
    "fsdp2 x2": (2, MeshConfig(), FSDP2),
    "fsdp2 x4": (4, MeshConfig(), FSDP2),
    "hsdp 2x2": (4, MeshConfig(dp_replicate_size=2), FSDP2),
    "ddp x2": (2, MeshConfig(), DDPConfig()),
}


@pytest.mark.parametrize("family", ["llama", *slow("qwen3")])
@pytest.mark.parametrize(
    "layout",
    [
        "one process",
        "fsdp2 x1",
        pytest.param("fsdp2 x2", marks=pytest.mark.smoke),
        *slow("fsdp2 x4"),  # "hsdp 2x2" has four ranks
        "hsdp 2x2",
        "ddp x2",
    ],
)
def test_same_numbers_as_one_process(layout, family):
    world, mesh, config = LAYOUTS[layout]
    cases = [
        Case(family, packed=packed, num_microbatches=count, mesh=mesh, config=config, num_layers=2)
        for packed in (True, False)
        for count in (1, 3)
    ]
    for case, errors in zip(cases, launch(compare, world, cases), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


def _three_steps(rank, world, config):
    """(loss, gradient norm) of three AdamW steps, the way a recipe makes them: meta, parallelise, load, train."""
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    model_config = ModelConfig(config=tiny.tiny_fields("llama", tie_word_embeddings=True))
    part = build_part(model_config)
    module = parallelize(part, mesh, config)
    load_weights(part, model_config, device=config.parameter_device(mesh.device), seed=1)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    of_ranks = step_batches(Case(num_microbatches=2), 2)
    mine = [b for r, batches in enumerate(of_ranks) if r % world == rank for b in batches]
    steps = []
    for _ in range(3):
        result = train_step(SingleStage(module), mine, SFT(), optimizer, mesh, max_grad_norm=0.5)
        steps.append((result.loss.item(), result.grad_norm.item()))
    return steps


@pytest.mark.slow
def test_three_steps_from_an_unfilled_model_are_the_same_under_every_strategy():
    offload = replace(FSDP2, offload_policy=CPUOffload())
    want, *others = [
        torch.tensor(launch(_three_steps, world, config))
        for world, config in ((1, FSDP2), (2, FSDP2), (2, offload), (2, DDPConfig()), (1, DDPConfig()))
    ]
    assert want[0, 0] > want[2, 0]
    for got in others:
        assert torch.allclose(got, want, rtol=5e-6)


SABOTAGES = [
    mutations.average_instead_of_sum,
    mutations.local_weight_then_average,
    mutations.only_last_microbatch,
    mutations.masked_labels_trained,
    mutations.document_mask_dropped,
]


@pytest.mark.parametrize(
    ("sabotage", "config"),
    [
        (mutations.average_instead_of_sum, FSDP2),
        (mutations.only_last_microbatch, DDPConfig()),
        (mutations.document_mask_dropped, FSDP2),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in product(SABOTAGES, (FSDP2, DDPConfig()))),
    ],
)
def test_sabotage_is_noticed(sabotage, config):
    (errors,) = launch(compare, 2, [Case(config=config, num_layers=2)], sabotage)
    assert errors.gradient > CLEARLY_WRONG, f"blind to {sabotage.__name__}: {errors}"
