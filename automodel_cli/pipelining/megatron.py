"""Megatron-core's schedule arithmetic, under its names: warm-up counts, the interleaved table, orders, flags.

Pure functions on integers; nothing here communicates or imports torch. Where Megatron-core reads global state (the
pipeline rank and size), these functions take a communicator, as the newer Megatron-core does, or the three numbers by
keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class _Group(Protocol):
    def size(self) -> int: ...
    def rank(self) -> int: ...


class _Communicator(Protocol):
    pp_group: _Group
    virtual_pipeline_model_parallel_size: int | None


class RankMicrobatches(NamedTuple):
    """Virtual microbatches (one per chunk) of one rank: unpacks as Megatron-core's 4-tuple."""

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
    """How many virtual microbatches a rank has, runs before its first backward, and runs after that.

    Warm-up: everything when `forward_only`; none without pipelining; `p - r - 1` without interleaving (virtual size
    None); else `2 (p - r - 1) + (v - 1) g`, plus one with the overlapped expert all-to-all. Warm-up that covers the
    total, also exactly, is `all_in_warmup`.
    """
    if p2p_communicator is not None:
        pipeline_parallel_size = p2p_communicator.pp_group.size()
        pipeline_parallel_rank = p2p_communicator.pp_group.rank()
        virtual_pipeline_parallel_size = p2p_communicator.virtual_pipeline_model_parallel_size
    if pipeline_parallel_size is None or pipeline_parallel_rank is None:
        raise ValueError("give p2p_communicator, or pipeline_parallel_size and pipeline_parallel_rank")
    total = num_microbatches * num_model_chunks
    hops = pipeline_parallel_size - pipeline_parallel_rank - 1
    if forward_only:
        warmup = total
    elif pipeline_parallel_size == 1:
        warmup = 0
    elif virtual_pipeline_parallel_size is None:
        warmup = hops
    else:
        group = microbatch_group_size_per_vp_stage or pipeline_parallel_size
        warmup = 2 * hops + (num_model_chunks - 1) * group + bool(overlap_moe_expert_parallel_comm)
    all_in_warmup = warmup >= total
    warmup = min(warmup, total)
    return RankMicrobatches(total, all_in_warmup, warmup, total - warmup)


def check_microbatch_group_size(num_microbatches: int, pipeline_parallel_size: int, group_size: int) -> None:
    """Legal groups: `p <= g <= m`, else ValueError; last group full or at least p, else RuntimeError."""
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
    """(microbatch, chunk) of every virtual forward: groups of microbatches, chunk-major inside a group.

    The last group takes the rest. The k-th backward is microbatch `table[k][0]` on chunk `v - 1 - table[k][1]`.
    """
    group = microbatch_group_size_per_vp_stage
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_model_chunks)
        for microbatch in range(start, min(start + group, num_microbatches))
    ]


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """The table as signed chunks: +c is a forward of chunk c - 1, -c its backward.

    Warm-up forwards first, then one forward and one backward in turn, then the remaining backwards.
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    w, total = num_warmup_microbatches, len(forwards)
    steady = [step for k in range(w, total) for step in (forwards[k], backwards[k - w])]
    return [*forwards[:w], *steady, *backwards[total - w :]]


class Compute(NamedTuple):
    """One virtual microbatch on one rank: `F3.1` is the forward of microbatch 3 on chunk 1."""

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
    """What one rank computes, in order. `num_model_chunks` None is 1F1B; a number, even 1, the interleaved schedule.

    `group_size` defaults to the pipeline size. `extra_warmup` 1 is the order under the overlapped expert all-to-all.
    Raises ValueError and RuntimeError for an illegal group, as Megatron-core does.
    """
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
    backwards = [Compute("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
    steady = [step for k in range(warmup, len(table)) for step in (forwards[k], backwards[k - warmup])]
    return [*forwards[:warmup], *steady, *backwards[len(table) - warmup :]]


@dataclass(frozen=True)
class LayerOrder:
    """Layers in the order they run.

    `layers`: +l is the forward and -l the backward of global layer l (from 1), -l - 0.5 its weight gradient.
    `chunk_layer`: (chunk, layer in chunk), both from 0, for forwards; None for the others.
    """

    layers: list[float]
    chunk_layer: list[tuple[int, int] | None]


def get_overlap_moe_expert_parallel_comm_order(
    order: Sequence[int], num_layers_per_chunk: Sequence[int], capture_wgrad_graph: bool
) -> LayerOrder:
    """Expand a chunk order into layers as they run under the overlapped expert all-to-all.

    Between the first backward and the last forward every (backward, forward) pair runs layer by layer, the forward
    first. With split weight gradients each backward layer is followed by its weight gradient; in a pair the last one
    moves to the pair's end.
    """
    first = [sum(num_layers_per_chunk[:c]) for c in range(len(num_layers_per_chunk))]

    def forward(step: int) -> list[float]:
        chunk = step - 1
        return [float(first[chunk] + i + 1) for i in range(num_layers_per_chunk[chunk])]

    def backward(step: int) -> list[list[float]]:
        ids = [-layer for layer in reversed(forward(-step))]
        return [[layer, layer - 0.5] if capture_wgrad_graph else [layer] for layer in ids]

    begin = next((k for k, step in enumerate(order) if step < 0), len(order))
    end = max((k for k, step in enumerate(order) if step > 0), default=-1)
    layers: list[float] = []
    k = 0
    while k < len(order):
        step = order[k]
        if begin <= k < end and step < 0 and order[k + 1] > 0:
            layers += _interleave(forward(order[k + 1]), backward(step), capture_wgrad_graph)
            k += 2
            continue
        layers += forward(step) if step > 0 else [x for group in backward(step) for x in group]
        k += 1
    chunk_of = [(c, i) for c, count in enumerate(num_layers_per_chunk) for i in range(count)]
    return LayerOrder(layers, [chunk_of[int(x) - 1] if x > 0 else None for x in layers])


def _interleave(forward: list[float], backward: list[list[float]], split: bool) -> list[float]:
    """One pair, layer by layer, forward first; the longer one's tail follows; the last weight gradient ends it."""
    last_weight = [backward[-1].pop()] if split and backward else []
    merged: list[float] = []
    for k in range(max(len(forward), len(backward))):
        merged += forward[k : k + 1]
        merged += backward[k] if k < len(backward) else []
    return merged + last_weight


def checkpoint_activations_microbatch(
    virtual_microbatch: int, num_warmup: int, num_microbatches_with_partial_activation_checkpoints: int | None
) -> bool | None:
    """Whether a forward recomputes all its layers in the backward; None leaves it to the model's own setting.

    Of every window of `warm-up + 1` forwards (that many are alive at once) the first N keep their activations.
    `virtual_microbatch` counts forwards of the rank: the microbatch without interleaving.
    """
    if num_microbatches_with_partial_activation_checkpoints is None:
        return None
    return virtual_microbatch % (num_warmup + 1) >= num_microbatches_with_partial_activation_checkpoints


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """`cond`, switched off in validation passes after the first one (when the caller tells which one is the first)."""
    if first_val_step is not None and forward_only:
        return first_val_step and cond
    return cond


def forward_backward_func_name(pipeline_parallel_size: int, virtual_pipeline_parallel_size: int | None) -> str:
    """Which of the three functions `get_forward_backward_func` returns."""
    if pipeline_parallel_size == 1:
        return "forward_backward_no_pipelining"
    if virtual_pipeline_parallel_size is None:
        return "forward_backward_pipelining_without_interleaving"
    return "forward_backward_pipelining_with_interleaving"


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    decoder_seq_length: int | None = None,
    sequence_parallel: bool = False,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    variable_seq_lengths: bool = False,
) -> list[tuple[int, ...]]:
    """Shapes of what crosses a stage boundary: `[(tokens, rows, hidden)]`, or `[()]` for variable lengths.

    Raises ValueError when context or sequence parallelism does not divide the sequence (Megatron-core floors, and hangs
    later).
    """
    if variable_seq_lengths:
        return [()]
    tokens = seq_length if decoder_seq_length is None else decoder_seq_length
    ways = context_parallel_size * (tensor_parallel_size if sequence_parallel else 1)
    if tokens % ways:
        how = f"context parallel {context_parallel_size}" + (
            f" x sequence parallel {tensor_parallel_size}" if sequence_parallel else ""
        )
        raise ValueError(f"{tokens} tokens do not divide by {how} ({tokens} % {ways} = {tokens % ways})")
    return [(tokens // ways, micro_batch_size, hidden_size)]
