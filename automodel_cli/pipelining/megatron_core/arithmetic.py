"""More of Megatron-core's schedule arithmetic, under its names: orders as signed chunks and layers, flags, shapes.

Pure functions on integers; nothing here communicates or imports torch. What our own schedules share with it stands in
`schedule/orders.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
