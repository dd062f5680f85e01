"""Steps at which an interleaved rank reduces gradients and gathers parameters, so that all ranks do it together.

Torch-free. Follows Megatron-core's alignment: rank r runs r virtual steps behind, so it launches the collective of a
chunk r steps late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SyncPlan:
    """Collectives of one rank. Keys are virtual steps, counted from 0 for forwards and backwards. Values are chunks.

    `param_sync_func` is called at `params_at_start`, then at `params_before_forward`. With a `grad_sync_func`, it is
    called at `grads_after_backward`, and at `grads_at_end` for the other chunks. Without one, the backward steps
    `grads_in_backward` run outside no_sync, and the data-parallel wrapper reduces.
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
    """Return the plan of one rank, from `get_schedule_table`.

    Every chunk reduces at the backward of its last microbatch, or with a `grad_sync_func`, `pipeline_parallel_rank`
    steps later. Chunks 0 and 1 gather their parameters at the start, chunk c + 1 at the start of chunk c, `rank` steps
    earlier.
    """
    v, rank = num_model_chunks, pipeline_parallel_rank
    # `reversed`, so that the first k of each chunk is written last and wins.
    first_forward = {chunk: k for k, (_, chunk) in reversed(list(enumerate(schedule_table)))}
    last_backward = {v - 1 - chunk: k for k, (_, chunk) in enumerate(schedule_table)}
    params = {first_forward[chunk] - rank: chunk + 1 for chunk in range(1, v - 1)}
    if not grad_sync_func:
        in_backward = {k: chunk for chunk, k in last_backward.items()}
        return SyncPlan(tuple(range(min(2, v))), params, in_backward, {}, ())
    # Later ranks run the same backward earlier. `k + rank` delays them, so that all ranks reduce at about the same
    # time.
    after = {k + rank: chunk for chunk, k in last_backward.items() if k + rank < len(schedule_table)}
    at_end = tuple(chunk for chunk in range(v) if chunk not in after.values())
    return SyncPlan(tuple(range(min(2, v))), params, {}, after, at_end)
