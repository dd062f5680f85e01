"""Choose the least activation checkpointing with which the estimated memory fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.strategies.base import ParallelizerConfig
from automodel_cli.planning.plan import Plan, make_plan
from automodel_cli.planning.request import PlanRequest
from automodel_cli.planning.reserve import MARGIN, usable_bytes

GIB = 2**30
_QUICKEST_FIRST: tuple[bool | str, ...] = (False, "selective", "full", "minimal")
_SELECTIVE = 0.15
"""What selective recomputation costs, relative to full: norms, gates and residuals are repeated, no GEMMs."""


@dataclass(frozen=True)
class CheckpointingChoice:
    """`tried` are the modes in order, each with the bytes of the heaviest GPU; the last one was taken. `refused` is
    why nothing could be estimated, if so. `keeps_experts`: there is room for those of all layers, gathered."""

    mode: bool | str
    tried: tuple[tuple[bool | str, float], ...] = ()
    room: float = 0.0
    refused: str = ""
    keeps_experts: bool = False

    def __str__(self) -> str:
        name = _named(self.mode)
        if self.refused:
            return f"{name} ({self.refused})"
        *others, (_, peak) = self.tried
        more = "".join(f"; {_named(mode)} would need {size / GIB:.0f}" for mode, size in reversed(others))
        over = "" if peak <= self.room else ", which is more than there is"
        kept = ", with experts cast once a step" if self.keeps_experts else ""
        return f"{name} (planned peak {peak / GIB:.0f} GiB of {self.room / GIB:.0f} to be used{kept}{over}{more})"


def _named(mode: bool | str) -> str:
    return str(mode or "none")


def choose_activation_checkpointing(request: PlanRequest, memory: float) -> CheckpointingChoice:
    """For GPUs of `memory` bytes, from the fast estimate of `automodel plan`: the first of none, selective, full and,
    where experts are on other ranks, minimal whose heaviest GPU has room beside what is set aside. The last one where
    none has. Instead of full, and of selective where that is cheaper, as many layers as fill the room. Then, without a
    pipeline, experts stay gathered if there is room for that too."""
    # 80 GB card: 79.1 GiB less 5 GiB, divided by 1.08 for the error of the estimate, are 68.6 GiB.
    room = usable_bytes(memory / GIB) / (1 + MARGIN)
    tried: list[tuple[bool | str, float]] = []
    for mode in _QUICKEST_FIRST if request.layout.ep > 1 else _QUICKEST_FIRST[:-1]:
        try:
            tried.append((mode, _plan(request, mode).heaviest))
        except ConfigError as error:
            return CheckpointingChoice("full", refused=f"no estimate: {error.message}")
        if tried[-1][1] <= room:
            break
    some = _some_layers(request, dict(tried), room)
    if some is not None:
        tried.append(some)
    parallelizer = _parallelizer(request, tried[-1][0])
    keeping = parallelizer.keeping_experts() if request.layout.ep > 1 and request.layout.pp == 1 else None
    if keeping is not None:
        peak = make_plan(replace(request, parallelizer=keeping)).heaviest
        if peak <= room:
            return CheckpointingChoice(tried[-1][0], (*tried[:-1], (tried[-1][0], peak)), room, keeps_experts=True)
    return CheckpointingChoice(tried[-1][0], tuple(tried), room)


def _some_layers(request: PlanRequest, peaks: dict[bool | str, float], room: float) -> tuple[str, float] | None:
    """`full:k/n` with the smallest k that has room, and its peak. None where it is no cheaper than what was found."""
    last = next(reversed(peaks))
    if last not in ("selective", "full") or peaks[last] > room:
        return None
    full = _plan(request, "full")
    layers = sum(len(stage.layers) for stage in full.stages)
    # Example: 32 layers, 90 GiB without and 50 GiB with recomputation, 68.6 GiB to be used. A layer saves 1.25 GiB, so
    # at least ceil(21.4 / 1.25) = 18 layers are recomputed: full:18/32.
    saved = (peaks[False] - full.heaviest) / layers
    first = max(1, math.ceil((peaks[False] - room) / saved)) if saved > 0 else layers
    most = layers - 1 if last == "full" else math.ceil(_SELECTIVE * layers) - 1
    for number in range(first, most + 1):
        peak = _plan(request, mode := f"full:{number}/{layers}").heaviest
        if peak <= room:
            return mode, peak
    return None


def _plan(request: PlanRequest, mode: bool | str) -> Plan:
    return make_plan(replace(request, parallelizer=_parallelizer(request, mode)))


def _parallelizer(request: PlanRequest, mode: bool | str) -> ParallelizerConfig:
    assert isinstance(request.parallelizer, ParallelizerConfig)
    return replace(request.parallelizer, activation_checkpointing=mode)
