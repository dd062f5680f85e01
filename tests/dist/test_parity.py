"""Every data-parallel layout against one process, on loss, gradient norm and every gradient, packed and padded, with
one and several microbatches whose label masks are uneven over ranks. Then the sabotages that must not pass.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.distributed import gradients, parallelizer
from automodel_cli.distributed.config import DDPConfig
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.training import stages
from tests.dist.harness import launch
from tests.dist.parity import FSDP2, Case, compare

TOLERANCE = 1e-6
CLEARLY_WRONG = 1e-4

LAYOUTS = {
    "one process": (1, MeshConfig(), None),
    "fsdp2 x1": (1, MeshConfig(), FSDP2),
    "fsdp2 x2": (2, MeshConfig(), FSDP2),
    "fsdp2 x4": (4, MeshConfig(), FSDP2),
    "hsdp 2x2": (4, MeshConfig(dp_replicate_size=2), FSDP2),
    "ddp x2": (2, MeshConfig(), DDPConfig()),
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_numbers_as_one_process(layout, family):
    world, mesh, config = LAYOUTS[layout]
    cases = [
        Case(family, packed=packed, num_microbatches=count, mesh=mesh, config=config)
        for packed in (True, False)
        for count in (1, 3)
    ]
    for case, errors in zip(cases, launch(compare, world, cases), strict=True):
        assert errors.within(TOLERANCE), f"{case}: {errors}"


# Each sabotage runs on the ranks, around the real step.


def average_instead_of_sum(batches):
    patch.object(parallelizer, "sum_gradients", lambda module: None).start()
    return batches


def local_weight_then_average(batches):
    """Every rank divides by its own label tokens, and gradients are averaged: right only for equal counts."""
    sum_over = Mesh.sum_over

    def local_weight(self, axis, tensor):
        return tensor if axis is self.dp else sum_over(self, axis, tensor)

    patch.object(Mesh, "sum_over", local_weight).start()
    return average_instead_of_sum(batches)


def only_last_microbatch(batches):
    gradient_sync = gradients.gradient_sync

    def forget_then_sync(module, is_last):
        module.zero_grad()
        return gradient_sync(module, is_last=True)

    patch.object(stages, "gradient_sync", forget_then_sync).start()
    return batches


def masked_labels_trained(batches):
    return [replace(b, labels_BT=b.labels_BT.masked_fill(b.labels_BT == IGNORE_INDEX, 0)) for b in batches]


def document_mask_dropped(batches):
    rows, tokens = batches[0].shape
    one_document_per_row = batches[0].cu_seqlens.new_tensor([tokens * row for row in range(rows + 1)])
    return [replace(b, cu_seqlens=one_document_per_row, max_seqlen=tokens) for b in batches]


SABOTAGES = [
    average_instead_of_sum,
    local_weight_then_average,
    only_last_microbatch,
    masked_labels_trained,
    document_mask_dropped,
]


@pytest.mark.parametrize("config", [FSDP2, DDPConfig()], ids=["fsdp2", "ddp"])
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_sabotage_is_noticed(sabotage, config):
    (errors,) = launch(compare, 2, [Case(config=config)], sabotage)
    assert errors.gradient > CLEARLY_WRONG, f"blind to {sabotage.__name__}: {errors}"
