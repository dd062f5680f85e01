"""When an interleaved rank reduces gradients and gathers parameters, so that all ranks do it together.

Torch-free. Megatron-core's alignment: rank r runs r virtual steps behind, so it launches the collective of a chunk r
steps late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SyncPlan:
    """Keys are virtual steps of one rank, counted from 0 separately for forwards and backwards; values are chunks.

    `params_at_start`, then `params_before_forward` call `param_sync_func`. Gradients: with a `grad_sync_func`,
    `grads_after_backward` and, for chunks still waiting, `grads_at_end`; without one, the backward steps of
    `grads_in_backward` run outside no_sync and the data-parallel wrapper reduces by itself.
    """

    params_at_start: tuple[int, ...]
    params_before_forward: dict[int, int]
    grads_in_backward: dict[int, int]
    grads_after_backward: dict[int, int]
    grads_at_end: tuple[int, ...]


def plan_sync(
    schedule_table: Sequence[tuple[int, int]],
    num_model_chunks: int,
    pipeline_parallel_rank: int,
    *,
    grad_sync_func: bool,
) -> SyncPlan:
    """The plan of one rank, from `get_schedule_table`.

    Every chunk reduces at the backward of its last microbatch, `pipeline_parallel_rank` steps later with a
    `grad_sync_func`. Chunks 0 and 1 gather their parameters at the start, chunk c + 1 when chunk c starts, `rank` steps
    earlier.
    """
    v, rank = num_model_chunks, pipeline_parallel_rank
    first_forward = {chunk: k for k, (_, chunk) in reversed(list(enumerate(schedule_table)))}
    last_backward = {v - 1 - chunk: k for k, (_, chunk) in enumerate(schedule_table)}
    params = {first_forward[chunk] - rank: chunk + 1 for chunk in range(1, v - 1)}
    if not grad_sync_func:
        in_backward = {k: chunk for chunk, k in last_backward.items()}
        return SyncPlan(tuple(range(min(2, v))), params, in_backward, {}, ())
    after = {k + rank: chunk for chunk, k in last_backward.items() if k + rank < len(schedule_table)}
    at_end = tuple(chunk for chunk in range(v) if chunk not in after.values())
    return SyncPlan(tuple(range(min(2, v))), params, {}, after, at_end)
