"""Attention kernels on documents that are grouped on the host: flash on a CPU, and the dense definition anywhere.

Shapes: B rows, T tokens, H query heads, K KV heads, D head width, V value width, N = B*T tokens, M keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_cli.config.warn import warn
from automodel_cli.models.attention import dense
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.attention.ring_calls import Setting
from automodel_cli.models.context_parallel_layout import Context

if TYPE_CHECKING:
    pass


def as_rows(
    documents: segments.HostDocuments,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
) -> Tensor | None:
    """Run on full rows and return `out_BTHV`. None if the rows need regrouping."""
    rows, _, length, _ = query_BHTD.shape
    dtype, device = query_BHTD.dtype, query_BHTD.device
    if documents.are_rows(rows):
        mask = dense.visible_mask(length, (length,), (0,), setting.window, dtype, device)
    elif setting.way != "flash" or (
        (mask := segments.row_mask(documents, length, setting.window, dtype, device)) is None
    ):
        return None
    return in_rows(kernel_of(sink_H, setting), query_BHTD, key_BKTD, value_BKTV, mask)


def kernel_of(sink_H: Tensor | None, setting: Setting) -> segments.Kernel:
    """Return the kernel for documents that are grouped on the host."""
    if setting.way == "flash":
        return functools.partial(kernels.flash_cpu, sink_H=sink_H, scale=setting.scale)
    return functools.partial(dense.dense, sink_H=sink_H, scale=setting.scale, softcap=setting.softcap)


def groups_of(
    documents: segments.HostDocuments | None, context: Context | None, window: int | None, device: torch.device
) -> tuple[list[segments.Group], Tensor]:
    if context is not None:
        return segments.context_groups(context, window)
    assert documents is not None
    return segments.document_groups(documents, device)


_warned_dense: set[str] = set()


def warn_dense(reason: str, cost: Callable[[], int]) -> None:
    """Warn once per reason, because dense attention dominates time and memory on long rows."""
    if reason not in _warned_dense:
        _warned_dense.add(reason)
        warn(
            "high_memory_use",
            "attention uses the dense float32 definition. Each layer saves %.3g MiB of this microbatch for backward "
            "and needs about twice as much while it runs. Reason: %s. Shorter documents (data.seq_len) need less",
            cost() / 2**20,
            reason,
        )


def dense_cost(
    query_BHTD: Tensor, setting: Setting, documents: segments.HostDocuments | None, context: Context | None
) -> int:
    """Return the bytes that dense attention saves for backward."""
    rows, heads, length, _ = query_BHTD.shape
    if documents is not None and documents.are_rows(rows):
        pairs = rows * length**2
    else:
        groups, _ = groups_of(documents, context, setting.window, query_BHTD.device)
        pairs = sum(group.query_GS.numel() * group.key_GU.shape[1] for group in groups)
    return heads * pairs * dense.dense_bytes(query_BHTD.dtype, setting.softcap)


def in_rows(
    kernel: segments.Kernel, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTV: Tensor, mask: Tensor | None
) -> Tensor:
    """Run the kernel on rows without regrouping and return `out_BTHV`. Causal if `mask` is None."""
    heads = query_BHTD.shape[1]
    key_BHTD, value_BHTV = kernels.per_query_head(key_BKTD, heads), kernels.per_query_head(value_BKTV, heads)
    return kernel(query_BHTD, key_BHTD, value_BHTV, mask).transpose(1, 2)


def in_groups(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
    groups: list[segments.Group],
    back_N: Tensor,
) -> Tensor:
    """Run on grouped documents and return `out_NHV`."""
    k_MHD, v_MHV = (kernels.per_query_head(x, q_NHD.shape[1]) for x in (k_MKD, v_MKV))
    return segments.run_grouped(kernel_of(sink_H, setting), q_NHD, k_MHD, v_MHV, groups, back_N, setting.window)
