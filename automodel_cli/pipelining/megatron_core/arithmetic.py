"""Schedule arithmetic of Megatron-core under its names: orders as signed chunks and layers, flags and shapes.

Pure functions on integers, without communication and without torch. `schedule/one_f_one_b.py` has the functions that
our own schedules use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the table as signed chunks: +c is a forward of chunk c - 1, -c its backward.

    Warm-up forwards come first, then forwards and backwards alternate, then the remaining backwards.
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    w, total = num_warmup_microbatches, len(forwards)
    steady = [step for k in range(w, total) for step in (forwards[k], backwards[k - w])]
    return [*forwards[:w], *steady, *backwards[total - w :]]


@dataclass(frozen=True)
class LayerOrder:
    """Layers in execution order.

    Attributes:
        layers: +l is the forward and -l the backward of global layer l (from 1), -l - 0.5 its weight gradient.
        chunk_layer: (chunk, layer in chunk) of forwards, both from 0. None for backwards.
    """

    layers: list[float]
    chunk_layer: list[tuple[int, int] | None]


def get_overlap_moe_expert_parallel_comm_order(
    order: Sequence[int], num_layers_per_chunk: Sequence[int], capture_wgrad_graph: bool
) -> LayerOrder:
    """Expand a chunk order into layers, as they run under the overlapped expert all-to-all.

    Between the first backward and the last forward, every (backward, forward) pair runs layer by layer, forward first.
    With split weight gradients, each backward layer is followed by its weight gradient. In a pair, the last weight
    gradient moves to the end of the pair.
    """
    # Example: chunks of 2 and 1 layers, pair (+2, -1): forward of layer 3, backward of layers 2 and 1. Merged: 3 -2 -1.
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
    """Merge one pair layer by layer, forward first, then the rest of the longer one, then the last weight gradient."""
    last_weight = [backward[-1].pop()] if split and backward else []
    merged: list[float] = []
    for k in range(max(len(forward), len(backward))):
        merged += forward[k : k + 1]
        merged += backward[k] if k < len(backward) else []
    return merged + last_weight


def checkpoint_activations_microbatch(
    virtual_microbatch: int, num_warmup: int, num_microbatches_with_partial_activation_checkpoints: int | None
) -> bool | None:
    """Return whether a forward recomputes all its layers in the backward. None uses the setting of the model.

    Of every window of `num_warmup + 1` forwards (so many are alive at once), the first N keep their activations.
    `virtual_microbatch` counts the forwards of the rank.
    """
    if num_microbatches_with_partial_activation_checkpoints is None:
        return None
    # Warm-up 3 and N = 1: of forwards 0 to 3, forward 0 keeps its activations and 1 to 3 recompute. Then 4 keeps, and
    # so on.
    return virtual_microbatch % (num_warmup + 1) >= num_microbatches_with_partial_activation_checkpoints


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """Return `cond`, but False in validation passes after the first one, if `first_val_step` is set."""
    if first_val_step is not None and forward_only:
        return first_val_step and cond
    return cond


def forward_backward_func_name(pipeline_parallel_size: int, virtual_pipeline_parallel_size: int | None) -> str:
    """Return the name of the function that `get_forward_backward_func` returns."""
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
    """Return the shapes of tensors between stages: `[(tokens, rows, hidden)]`, or `[()]` for variable lengths.

    Raises ValueError if context or sequence parallelism does not divide the sequence. Megatron-core rounds down, and
    deadlocks later.
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
