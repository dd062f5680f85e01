"""The loader of a run: over prepared data, or over data that are read while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from automodel_cli.data.batch import Batch
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.data.streaming.stream_loader import StreamLoader
from automodel_cli.distributed.device_threads import on_this_device
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.run.recipe import Recipe


def make_loader(recipe: Recipe, train: Any, mesh: Mesh) -> Any:
    """Return the `BatchLoader` or `StreamLoader` of `train`, the training data. Collective."""
    options: dict[str, Any] = {
        **recipe.rows_of_a_step(),
        "dp_rank": mesh.dp_rank,
        "dp_size": mesh.dp_size,
        "seed": recipe.seed,
        "shuffle": recipe.data.shuffle,
        "batch_size": None if recipe.train.batch_size_ramp is None else recipe.train.batch_size,
    }
    if recipe.data.streaming is not None:
        return StreamLoader(
            train,
            **options,
            batch_sizes=recipe.train.batch_sizes,
            prepare=prepared_for(mesh.device),
            gather=lambda value: _gathered(value, mesh),
            sum_over=lambda tensor: mesh.sum_over(mesh.dp, tensor),
        )
    has_pictures = getattr(train, "pictures", None) is not None  # pixels are read while a step runs
    return BatchLoader(
        train,
        **options,
        prepare=prepared_for(mesh.device) or (_unchanged if has_pictures else None),
        row_costs=train.row_costs() if has_pictures else None,
    )


def prepared_for(device: torch.device) -> Callable[[object], object] | None:
    """Return the function that pins batches in the loader's thread. None on a CPU, which needs no pinned memory."""
    return on_this_device(_pinned) if device.type == "cuda" else None


def _gathered(value: object, mesh: Mesh) -> list[object]:
    """Return the objects of all data-parallel ranks. Collective."""
    found: list[object] = [None] * mesh.dp_size
    dist.all_gather_object(found, value, group=mesh.dp.get_group())
    return found


def _unchanged(batch: object) -> object:
    return batch


def _pinned(batch: object) -> object:
    return batch.pinned() if isinstance(batch, Batch) else batch
