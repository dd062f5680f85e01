"""Known mistakes, made on the ranks around the real step: each takes this rank's microbatches and gives back those to
train on. A parity test that one of them passes is blind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.strategies.ddp.wrap import DDPSharded
from automodel_cli.distributed.strategies.fsdp2 import sharding as fsdp2
from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import FSDP2Sharded
from automodel_cli.distributed.tensor_parallel.styles import SumParameterGradients
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.training import step


def average_instead_of_sum(batches: list[Batch]) -> list[Batch]:
    patch.object(fsdp2, "sum_gradients", lambda module: None).start()
    patch.object(DistributedDataParallel, "register_comm_hook", lambda self, state, hook: None).start()
    return batches


def local_weight_then_average(batches: list[Batch]) -> list[Batch]:
    """Every rank divides by its own label tokens, and gradients are averaged: right only for equal counts."""
    sum_over = Mesh.sum_over

    def local_weight(self: Mesh, axis: Any, tensor: Tensor) -> Tensor:
        return tensor if axis is self.dp else sum_over(self, axis, tensor)

    patch.object(Mesh, "sum_over", local_weight).start()
    return average_instead_of_sum(batches)


def only_last_microbatch(batches: list[Batch]) -> list[Batch]:
    for handle in (FSDP2Sharded, DDPSharded):

        def forget_then_sync(self: Any, is_last: bool, microbatch: Any = handle.microbatch) -> Any:
            self.part.zero_grad()
            return microbatch(self, is_last=True)

        patch.object(handle, "microbatch", forget_then_sync).start()
    return batches


def masked_labels_trained(batches: list[Batch]) -> list[Batch]:
    return [replace(b, labels_BT=b.labels_BT.masked_fill(b.labels_BT == IGNORE_INDEX, 0)) for b in batches]


def document_mask_dropped(batches: list[Batch]) -> list[Batch]:
    rows, tokens = batches[0].shape
    one_document_per_row = batches[0].cu_seqlens.new_tensor([tokens * row for row in range(rows + 1)])
    return [replace(b, cu_seqlens=one_document_per_row, max_seqlen=tokens) for b in batches]


def norm_without_stages(batches: list[Batch]) -> list[Batch]:
    """Every pipeline rank clips by the norm of its own stages. Gradients and loss are right."""
    sum_over = Mesh.sum_over

    def own_stages(self: Mesh, axis: Any, tensor: Tensor) -> Tensor:
        return tensor if axis.mesh_dim_names == ("pp",) else sum_over(self, axis, tensor)

    patch.object(Mesh, "sum_over", own_stages).start()
    return batches


def expert_gradients_over_ep(batches: list[Batch]) -> list[Batch]:
    """Experts are summed over all data-parallel ranks, as if every rank held the same ones."""
    clip = step.clip_grad_norm_

    def sum_again(parts: Any, max_norm: float | None, mesh: Mesh) -> Tensor:
        assert mesh.ep is not None
        for part in parts:
            for param in (p for experts in experts_modules(part) for p in experts.parameters()):
                dist.all_reduce(param.grad.to_local(), group=mesh.ep.get_group())
        return clip(parts, max_norm, mesh)

    patch.object(step, "clip_grad_norm_", sum_again).start()
    return batches


def labels_shifted_after_sharding(batches: list[Batch]) -> list[Batch]:
    """Next-token labels made from each rank's own tokens: wrong where its chunks end."""
    local = Context.local

    def shifted_late(self: Context, x_BT: Tensor, fill: int) -> Tensor:
        return local(self, x_BT.roll(1, 1), fill).roll(-1, 1) if fill == IGNORE_INDEX else local(self, x_BT, fill)

    patch.object(Context, "local", shifted_late).start()
    return batches


def context_gathered_in_rank_order(batches: list[Batch]) -> list[Batch]:
    """Log-probs come back as the ranks hold them, not as the rows run."""

    def whole(self: Context, x_Bt: Tensor) -> Tensor:
        of_ranks = self.group.gather_results(x_Bt.contiguous()).unflatten(0, (self.group.size, self.rows))
        return of_ranks.transpose(0, 1).flatten(1)[:, : self._length]

    patch.object(Context, "gather_rows", whole).start()
    return batches


def head_norms_not_summed(batches: list[Batch]) -> list[Batch]:
    """Norms of queries and keys see one tp rank's heads only, and keep that rank's gradient."""
    patch.object(SumParameterGradients, "_apply", lambda self, module, device_mesh: module).start()
    return batches
