"""Embeddings of a step from all ranks, and their gradients as columns of the batches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.objectives.embedding import Documents, EmbeddingObjective
from automodel_cli.training.stages import Stages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Embedded(NamedTuple):
    """Embeddings of a step.

    Attributes:
        batches: batches of this rank, on its device.
        sizes: number of documents of each batch.
        documents: documents of all data-parallel ranks.
        first: index of the first document of this rank among them.
    """

    batches: list[Batch]
    sizes: list[int]
    documents: Documents
    first: int


def with_gradients(stages: Stages, batches: list[Batch], objective: EmbeddingObjective, mesh: Mesh) -> list[Batch]:
    """Return the batches with the losses of their queries and the gradients of their embeddings. Collective."""
    on_device, sizes, everywhere, first = embed(stages, batches, objective, mesh)
    losses_N, gradients_ND = objective.global_loss(everywhere)
    of_rank = slice(first, first + sum(sizes))
    parts = zip(on_device, losses_N[of_rank].split(sizes), gradients_ND[of_rank].split(sizes), strict=True)
    return [
        batch.with_columns(query_losses_S=losses_S, pooled_gradients_SD=gradients_SD)
        for batch, losses_S, gradients_SD in parts
    ]


def embed(stages: Stages, batches: Sequence[Batch], objective: EmbeddingObjective, mesh: Mesh) -> Embedded:
    """Run a forward without gradients, and gather the embeddings of all data-parallel ranks. Collective."""

    def pooled(output: HeadOutput, batch: Batch) -> Tensor:
        return objective.pooled(output, batch)

    on_device = [batch.to(mesh.device) for batch in batches]
    pooled_of = stages.forward(on_device, pooled, objective.needs)
    own = [len(of_batch) for of_batch in pooled_of]
    local = Documents(
        torch.cat(pooled_of),
        torch.cat([batch.extra["roles_S"] for batch in on_device]),
        torch.cat([batch.extra["scores_S"] for batch in on_device]),
        torch.cat([document_hashes(batch) for batch in batches]).to(mesh.device),
    )
    if mesh.dp_size == 1:
        return Embedded(on_device, own, local, 0)
    group = mesh.dp.get_group()
    sizes = _sizes(len(local.pooled_ND), mesh, group)
    everywhere = Documents(*(_gathered(column, sizes, group) for column in local))
    return Embedded(on_device, own, everywhere, sum(sizes[: mesh.dp_rank]))


def document_hashes(batch: Batch) -> Tensor:
    """Return a hash of the tokens of each document, int64."""
    ids_N = batch.input_ids_BT.flatten().cpu().numpy()
    bounds = batch.cu_seqlens.tolist()
    texts = [ids_N[a:b].tobytes() for a, b in pairwise(bounds)]
    return torch.tensor([zlib.crc32(text) << 31 | zlib.adler32(text) for text in texts], dtype=torch.int64)


def _sizes(size: int, mesh: Mesh, group: ProcessGroup) -> list[int]:
    own = torch.tensor([size], device=mesh.device)
    sizes = [torch.empty_like(own) for _ in range(mesh.dp_size)]
    dist.all_gather(sizes, own, group=group)
    return [int(of_rank) for of_rank in sizes]


def _gathered(column: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks in the order of ranks. Ranks may have different numbers of rows."""
    padded = column.new_zeros(max(sizes), *column.shape[1:])
    padded[: len(column)] = column
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
