"""Index arithmetic of token dispatch as two custom operators.

On CUDA, one Triton kernel each (`permute_triton`) replaces seven or more small kernels, whose launch takes longer than
their computation. Elsewhere torch operators compute the definition. The kernels have not run on a GPU yet. On first use
they are compared with the definition. If they differ, they are disabled with a warning.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from automodel_cli.distributed import kernel_verification


@torch.library.custom_op("automodel::dispatch_pairs", mutates_args=())
def permute_pairs(expert_P: Tensor, order_P: Tensor, choices: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token of each sorted pair `[P]`, the inverse of the sort `[P]`, and the pairs per expert `[E]`, int64.

    Example: experts (2, 0) of token 0 and (0, 1) of token 1 give `expert_P` = [0, 0, 1, 2] and `order_P` = [1, 2, 3,
    0]. The result is tokens [0, 1, 1, 0], inverse [3, 0, 1, 2] and counts [2, 1, 1].

    Args:
        expert_P: expert of each pair, sorted in ascending order.
        order_P: index of each sorted pair before sorting. Pair `t * choices + k` is choice k of token t.
        choices: experts per token, K.
    """
    if has_permute_kernels(expert_P.device.type):
        from automodel_cli.distributed.expert_parallel import permute_triton

        return permute_triton.pairs(expert_P, order_P, choices, num_experts)
    return _pairs(expert_P, order_P, choices, num_experts)


@permute_pairs.register_fake
def _(expert_P: Tensor, order_P: Tensor, choices: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(order_P), torch.empty_like(order_P), order_P.new_empty(num_experts)


def _pairs(expert_P: Tensor, order_P: Tensor, choices: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    pair_P = torch.arange(len(order_P), device=order_P.device)
    # Inverse of a permutation: place[order[i]] = i. A scatter costs one pass, `argsort` would sort again.
    place_P = torch.empty_like(order_P).scatter_(0, order_P, pair_P)
    experts = torch.arange(num_experts + 1, device=order_P.device)
    # searchsorted instead of bincount, which synchronizes with the host twice to allocate its result.
    # expert_P [0, 0, 1, 2] and 3 experts: the first positions are [0, 2, 3] and the end is 4, so the counts are [2, 1,
    # 1].
    return order_P // choices, place_P, torch.searchsorted(expert_P, experts).diff()


@torch.library.custom_op("automodel::dispatch_arrivals", mutates_args=())
def permute_arrivals(received_RL: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the permutation that sorts received rows by expert.

    Rows arrive sorted by source rank, then by local expert. The sort is stable, so rows of an expert stay in rank
    order.

    Args:
        received_RL: rows from each rank for each local expert, int64.
        num_rows: their sum N. Passed to avoid a host synchronization.

    Returns the permutation `[N]`, its inverse `[N]`, the local expert of each sorted row `[N]`, and the end of each
    expert, int32 `[L]`.
    """
    if has_permute_kernels(received_RL.device.type):
        from automodel_cli.distributed.expert_parallel import permute_triton

        return permute_triton.arrivals(received_RL.contiguous(), num_rows)
    return _arrivals(received_RL, num_rows)


@permute_arrivals.register_fake
def _(received_RL: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order_N, place_N, expert_N = (received_RL.new_empty(num_rows) for _ in range(3))
    return order_N, place_N, expert_N, received_RL.new_empty(received_RL.shape[1], dtype=torch.int32)


def _arrivals(received_RL: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks, num_local = received_RL.shape
    # Example: received_RL [[1, 1], [2, 1]] arrives as experts 0 1 0 0 1. Sorted: order 0 2 3 1 4, place 0 3 1 2 4, ends
    # 3 5.
    expert_RL = torch.arange(num_local, device=received_RL.device).repeat(ranks)
    # `output_size` avoids a host synchronization, which `repeat_interleave` needs to learn its output size.
    arrived_N = expert_RL.repeat_interleave(received_RL.flatten(), output_size=num_rows)
    expert_N, order_N = torch.sort(arrived_N, stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(num_rows, device=order_N.device))
    return order_N, place_N, expert_N, received_RL.sum(0).cumsum(0, dtype=torch.int32)


@functools.cache
def has_permute_kernels(device_type: str) -> bool:
    """Return whether the Triton kernels are used on this device type. Warns once if CUDA cannot use them."""
    return kernel_verification.trusted(
        device_type,
        "token dispatch",
        lambda device: "" if agree(device) else "they differ from the definition",
    )


@torch.no_grad()
def agree(device: torch.device) -> bool:
    """Return whether both kernels equal the definition, also with unused experts and ranks that send nothing."""
    from automodel_cli.distributed.expert_parallel import permute_triton

    generator = torch.Generator().manual_seed(0)
    # More pairs than a block, a single pair, and more experts than pairs. Half of the experts are unused.
    for num_experts, tokens, choices in ((6, 3000, 2), (5, 1, 1), (3000, 4, 3)):
        index_P = torch.randint(num_experts // 2 + 1, (tokens * choices,), generator=generator)
        expert_P, order_P = torch.sort(index_P.to(device), stable=True)
        given = (expert_P, order_P, choices, num_experts)
        if not _same(permute_triton.pairs(*given), _pairs(*given)):
            return False
    for ranks, num_local, most in ((3, 5, 2000), (1, 1, 3), (4, 2, 2)):
        received_RL = torch.randint(most, (ranks, num_local), generator=generator)
        received_RL[-1] = 0
        received_RL[0, 0] = most
        num_rows = int(received_RL.sum())
        received_RL = received_RL.to(device)
        if not _same(permute_triton.arrivals(received_RL, num_rows), _arrivals(received_RL, num_rows)):
            return False
    return True


def _same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
