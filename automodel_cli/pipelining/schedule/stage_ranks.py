"""Placement of stages on ranks. Torch-free."""

from __future__ import annotations

from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice

ScheduleKind = Literal["single", "multi"]


Style = Literal["loop", "v"]


def stages_of_rank(rank: int, pp_size: int, num_stages: int, style: Style = "loop") -> tuple[int, ...]:
    """Return the stages of a rank: loop `r, r+p, r+2p, ...`, or V (exactly two per rank) `r, S-1-r`.

    Example: 8 stages on 4 ranks. Rank 1 has the stages (1, 5) in a loop, and (1, 6) on a V.
    """
    if num_stages % pp_size:
        raise ConfigError(
            f"{num_stages} stages must be a multiple of pp_size={pp_size} ranks ({num_stages} % {pp_size} != 0)",
            code="not_divisible",
            keys=("pp_size",),
        )
    if style == "loop":
        return tuple(range(rank, num_stages, pp_size))
    check_choice("style", style, ("loop", "v"))
    if num_stages != 2 * pp_size:
        raise ConfigError(
            f"a V placement needs exactly 2 stages per rank, not {num_stages // pp_size}",
            code="stage_count",
            fix=f"{2 * pp_size} stages",
        )
    # On a V, the last stage is on rank 0 with the first one, and the bend is on the last rank: no transfer there.
    return (rank, num_stages - 1 - rank)


def stage_owners(pp_size: int, num_stages: int, style: Style = "loop") -> tuple[int, ...]:
    """Return the rank of every stage."""
    owner = {s: r for r in range(pp_size) for s in stages_of_rank(r, pp_size, num_stages, style)}
    return tuple(owner[s] for s in range(num_stages))
