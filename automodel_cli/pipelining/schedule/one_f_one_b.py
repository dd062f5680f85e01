"""Order of computation under 1F1B and interleaved 1F1B.

Pure functions on integers with the names of Megatron-core (Megatron-LM, arXiv 2104.04473). Megatron-core reads pipeline
rank and size from global state. These functions take a communicator, as newer versions of Megatron-core do, or the
numbers as keywords.

Example: p=4 ranks, m=8 microbatches. Rank 0 runs 3 forwards, then 5 pairs of forward and backward, then 3 backwards.
Rank 3 runs 8 pairs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class _Group(Protocol):
    def size(self) -> int: ...
    def rank(self) -> int: ...


class _Communicator(Protocol):
    pp_group: _Group
    virtual_pipeline_model_parallel_size: int | None


class RankMicrobatches(NamedTuple):
    """Virtual microbatches (one per microbatch and chunk) of one rank. Unpacks as Megatron-core's 4-tuple."""

    total: int
    all_in_warmup: bool
    warmup: int
    remaining: int


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int | None,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: _Communicator | None = None,
    *,
    pipeline_parallel_size: int | None = None,
    pipeline_parallel_rank: int | None = None,
    virtual_pipeline_parallel_size: int | None = None,
) -> RankMicrobatches:
    """Return how many virtual microbatches a rank has, how many it runs before its first backward, and how many remain.

    Warm-up, with p ranks, rank r, v chunks and groups of g microbatches:

    - all if `forward_only`,
    - none without pipelining,
    - `p - r - 1` without interleaving (virtual size None),
    - `2 (p - r - 1) + (v - 1) g` otherwise, plus one with the overlapped expert all-to-all.

    `all_in_warmup` is True if the warm-up covers the total.
    """
    if p2p_communicator is not None:
        pipeline_parallel_size = p2p_communicator.pp_group.size()
        pipeline_parallel_rank = p2p_communicator.pp_group.rank()
        virtual_pipeline_parallel_size = p2p_communicator.virtual_pipeline_model_parallel_size
    if pipeline_parallel_size is None or pipeline_parallel_rank is None:
        raise ValueError("give p2p_communicator, or pipeline_parallel_size and pipeline_parallel_rank")
    total = num_microbatches * num_model_chunks
    # A microbatch needs `hops` further stages before its backward can return, so 1F1B runs that many forwards ahead.
    hops = pipeline_parallel_size - pipeline_parallel_rank - 1
    if forward_only:
        warmup = total
    elif pipeline_parallel_size == 1:
        warmup = 0
    elif virtual_pipeline_parallel_size is None:
        warmup = hops
    else:
        # Example: p = 4, rank 0, v = 2, g = 4 gives 2 * 3 + 1 * 4 = 10 forwards before the first backward. The first
        # backward belongs to chunk 1, whose forwards begin after g forwards of chunk 0. Its activations travel 3 hops
        # to the last rank, and its gradient travels 3 hops back.
        group = microbatch_group_size_per_vp_stage or pipeline_parallel_size
        warmup = 2 * hops + (num_model_chunks - 1) * group + bool(overlap_moe_expert_parallel_comm)
    all_in_warmup = warmup >= total
    # With few microbatches, the warm-up may exceed the total. All forwards then run before the first backward, as in
    # GPipe.
    warmup = min(warmup, total)
    return RankMicrobatches(total, all_in_warmup, warmup, total - warmup)


def check_microbatch_group_size(num_microbatches: int, pipeline_parallel_size: int, group_size: int) -> None:
    """Raise ValueError unless `p <= g <= m`, and RuntimeError if the last group is smaller than both g and p."""
    p, m, g = pipeline_parallel_size, num_microbatches, group_size
    if not p <= g <= m:
        raise ValueError(
            f"group-range: microbatch_group_size={g} must be at least pp_size={p} and at most num_microbatches={m}"
        )
    if 0 < m % g < p:
        raise RuntimeError(
            f"group-remainder: {m} microbatches in groups of {g} leave a last group of {m % g}, "
            f"fewer than pp_size={p}: it would wait for itself"
        )


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of every virtual forward: groups of microbatches, chunk-major inside a group.

    The last group has the remaining microbatches. Backward k is microbatch `table[k][0]` on chunk `v - 1 -
    table[k][1]`.

    Example: 4 microbatches, 2 chunks, groups of 2: (0,0) (1,0) (0,1) (1,1) (2,0) (3,0) (2,1) (3,1).
    """
    group = microbatch_group_size_per_vp_stage
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_model_chunks)
        for microbatch in range(start, min(start + group, num_microbatches))
    ]


class Compute(NamedTuple):
    """One virtual microbatch on one rank. `F3.1` is the forward of microbatch 3 on chunk 1."""

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


def compute_order(
    num_microbatches: int,
    pipeline_parallel_size: int,
    pipeline_parallel_rank: int,
    num_model_chunks: int | None = None,
    group_size: int | None = None,
    *,
    forward_only: bool = False,
    extra_warmup: int = 0,
) -> list[Compute]:
    """Return the computations of one rank in order.

    Args:
        num_model_chunks: None selects 1F1B. A number, even 1, selects the interleaved schedule.
        group_size: microbatches per chunk and round. Defaults to the pipeline size.
        extra_warmup: 1 with the overlapped expert all-to-all.

    Raises ValueError or RuntimeError for an invalid group size, as Megatron-core does.
    """
    # Example: m = 4, p = 2, v = 2, g = 2, rank 0 has a warm-up of 2 * 1 + 1 * 2 = 4. The backward of chunk 1 comes
    # first:
    #     F0.0 F1.0 F0.1 F1.1   F2.0 B0.1  F3.0 B1.1  F2.1 B0.0  F3.1 B1.0   B2.1 B3.1 B2.0 B3.0
    #     warm-up               steady state                                 cool-down
    # Rank 1 has a warm-up of 2: its chunk 1 has the loss, so B0.1 follows F0.1 directly.
    p, chunks = pipeline_parallel_size, num_model_chunks or 1
    group = num_microbatches if num_model_chunks is None else (group_size or p)
    if num_model_chunks is not None:
        check_microbatch_group_size(num_microbatches, p, group)
    warmup = get_pp_rank_microbatches(
        num_microbatches,
        chunks,
        group,
        forward_only,
        bool(extra_warmup),
        pipeline_parallel_size=p,
        pipeline_parallel_rank=pipeline_parallel_rank,
        virtual_pipeline_parallel_size=num_model_chunks,
    ).warmup
    table = get_schedule_table(num_microbatches, chunks, group)
    forwards = [Compute("F", microbatch, chunk) for microbatch, chunk in table]
    if forward_only:
        return forwards
    # Backwards run in the same order with reversed chunks: the last chunk has the first backward.
    backwards = [Compute("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
    # Forward k is followed by backward k - warmup, so that `warmup` + 1 forwards are live at most.
    steady = [step for k in range(warmup, len(table)) for step in (forwards[k], backwards[k - warmup])]
    return [*forwards[:warmup], *steady, *backwards[len(table) - warmup :]]
