"""Build the program of a schedule.

Multi-stage schedules of torch are read from torch's own objects, the only reason to import torch here. GPipe, 1F1B,
grouped interleaving, ZB-H1 and ZB-H2 are generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.one_f_one_b import compute_order
from automodel_cli.pipelining.schedule.program import Action, Program, Step
from automodel_cli.pipelining.schedule.schedules import Schedule, check_schedule, find_schedule
from automodel_cli.pipelining.schedule.stage_ranks import stage_owners


def build_program(
    schedule: Schedule | str,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    group_size: int | None = None,
    extra_warmup: int = 0,
) -> Program:
    """Return the program of a schedule. Raises ConfigError as `check_schedule` does.

    Args:
        group_size: microbatches per chunk and round of Interleaved1F1B. None: torch's grouping, m // max(1, m // p).
        extra_warmup: with 1 (and `group_size`), run one more forward before the first backward, as the overlapped
            expert all-to-all does.
    """
    schedule = find_schedule(schedule) if isinstance(schedule, str) else schedule
    p, m, v = pp_size, num_microbatches, num_chunks
    check_schedule(schedule, p, m, v, group_size)
    if extra_warmup and group_size is None:
        raise ConfigError(
            "extra_warmup needs schedule=Interleaved1F1B and microbatch_group_size", code="requires_setting"
        )
    # The same 3 microbatches on 2 ranks, with forward, input gradient and weight gradient of equal length:
    #     1F1B   rank 0   0F0 0F1 0B0 0F2 0B1 0B2              12 units, 3 of them idle
    #            rank 1   1F0 1B0 1F1 1B1 1F2 1B2
    #     ZB-H1  rank 0   0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2  10 units, 1 of them idle
    #            rank 1   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    # Rank 0 waits for input gradients only. By postponing W, rank 1 sends them earlier.
    ranks: Iterable[tuple[Step, ...]]
    if schedule.name == "GPipe":
        ranks = [_gpipe(rank, m) for rank in range(p)]
    elif schedule.name == "1F1B":
        ranks = [_from_megatron(compute_order(m, p, rank), p, rank) for rank in range(p)]
    elif schedule.name == "ZB-H1":
        # Later ranks finish their backwards earlier, so they postpone more weight gradients to the end of the step.
        ranks = [_zero_bubble(rank, m, warmup=p - 1 - rank, delay=rank) for rank in range(p)]
    elif schedule.name == "ZB-H2":
        ranks = [_zero_bubble(rank, m, warmup=2 * (p - 1 - rank), delay=2 * rank) for rank in range(p)]
    elif group_size is not None:
        orders = [compute_order(m, p, rank, v, group_size, extra_warmup=extra_warmup) for rank in range(p)]
        ranks = [_from_megatron(order, p, rank) for rank, order in enumerate(orders)]
    else:
        from automodel_cli.pipelining.schedule.actions import rank_programs

        assert schedule.torch_class is not None, f"no generator for {schedule.name}"
        ranks = rank_programs(schedule.torch_class, p, m, v)
    return Program(schedule.name, m, stage_owners(p, p * v, schedule.style), tuple(ranks))


def _gpipe(stage: int, m: int) -> tuple[Step, ...]:
    return tuple(Action(kind, stage, k) for kind in "FB" for k in range(m))


def _from_megatron(order: Sequence[tuple[str, int, int]], p: int, rank: int) -> tuple[Step, ...]:
    # Chunk c of rank r is stage c p + r: rank 0 has stages 0 and 4 with p = 4 and v = 2.
    return tuple(Action(kind, chunk * p + rank, microbatch) for kind, microbatch, chunk in order)


def _zero_bubble(stage: int, m: int, *, warmup: int, delay: int) -> tuple[Step, ...]:
    """Return 1F1B with split backwards. Weight gradients run as soon as more than `delay` are pending (arXiv
    2401.10241).

    Example: stage 1 of p=2, m=3 (warmup 0, delay 1): F0 I0 F1 I1 W0 F2 I2 W1 W2.
    """
    # 1. Warm-up: forwards that later stages need before their first backward.
    steps = [Action("F", stage, k) for k in range(min(warmup, m))]
    forwards, weights = len(steps), 0
    # 2. Steady state: one forward, one input gradient, and a weight gradient if more than `delay` are pending.
    for k in range(m):
        if forwards < m:
            steps.append(Action("F", stage, forwards))
            forwards += 1
        steps.append(Action("I", stage, k))
        if k + 1 - weights > delay:
            steps.append(Action("W", stage, weights))
            weights += 1
    # 3. The remaining weight gradients fill the bubble at the end.
    return tuple(steps + [Action("W", stage, k) for k in range(weights, m)])
