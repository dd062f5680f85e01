"""Simulate a schedule: timeline, idle time and activation peak of every rank, from a program and the costs of its
stages.

Exact event-driven simulation. An action starts at `max(rank is free, end of the dependency + hop if it crosses ranks)`.
Sends take no time on the sender, and links do not queue. Torch-free, except for programs that torch generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.program import Action, Program, Step


@dataclass(frozen=True)
class Costs:
    """Time per microbatch of forward, input gradients and weight gradients of every stage, and of one hop.

    `overlap` is for paired actions (DualPipeV). None runs them one after the other, as torch does. A factor x runs them
    as one block of x * (F + B).
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    hop: float = 0.0
    overlap: float | None = None

    def of(self, action: Action) -> float:
        """Return the duration of one action."""
        i, w = self.backward_input[action.stage], self.backward_weight[action.stage]
        return {"F": self.forward[action.stage], "I": i, "W": w, "B": i + w}[action.kind]

    def of_rank(self, program: Program, rank: int) -> float:
        """Return the work of a rank in one step."""
        return sum(self.of(action) for action in program.actions(rank))


def even_costs(
    program: Program,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    *,
    hop: float = 0.0,
    overlap: float | None = None,
    first_stage_needs_no_input_gradient: bool = False,
) -> Costs:
    """Return the costs of equal stages.

    Args:
        forward, backward_input, backward_weight: time of one microbatch through all layers of one rank. A stage takes 1
            / v of it.
        first_stage_needs_no_input_gradient: stage 0 computes its whole backward in W, as torch does with token inputs.
    """
    stages, v = program.num_stages, program.num_chunks
    f, i, w = ([x / v] * stages for x in (forward, backward_input, backward_weight))
    if first_stage_needs_no_input_gradient:
        i[0], w[0] = 0.0, i[0] + w[0]
    return Costs(tuple(f), tuple(i), tuple(w), hop, overlap)


@dataclass(frozen=True)
class Span:
    """One action on the time axis."""

    action: Action
    start: float
    end: float
    paired: bool = False


@dataclass(frozen=True)
class Timeline:
    """Start and end of all actions, and derived values. Times are in the unit of the costs."""

    program: Program
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Time from the first action to the end of the last one on any rank."""
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @property
    def idle_per_rank(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle(self) -> float:
        """Largest idle time of a rank."""
        return max(self.idle_per_rank)

    @property
    def idle_fraction(self) -> float:
        """Mean of idle / makespan over the ranks."""
        return sum(self.idle_per_rank) / len(self.busy) / self.makespan

    @property
    def lower_bound(self) -> float | None:
        """Lower bound of any order of the same work: a rank cannot start before the input of its first stage exists.

        None with overlap. With equal stages: m (F + I + W) + (p - 1)(F / v + hop).
        """
        return None if self.costs.overlap is not None else _lower_bound(self.program, self.costs)

    @property
    def efficiency(self) -> float | None:
        """lower_bound / makespan."""
        return None if self.lower_bound is None else self.lower_bound / self.makespan

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak per rank, in microbatches through all layers of the rank. See the function `peak_activations`."""
        return peak_activations(self.program)


def _lower_bound(program: Program, costs: Costs) -> float:
    # The first stage of a rank gets its first input after the forwards of all earlier stages and their hops.
    first = [min(s for s, owner in enumerate(program.owner) if owner == rank) for rank in range(program.pp_size)]
    bounds = []
    for rank, stage in enumerate(first):
        # Adjacent stages on one rank, as at the bend of a V, need no hop.
        hops = sum(program.owner[s] != program.owner[s + 1] for s in range(stage))
        bounds.append(sum(costs.forward[:stage]) + hops * costs.hop + costs.of_rank(program, rank))
    return max(bounds)


def peak_activations(program: Program, per_stage: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the largest amount of live activations per rank.

    A forward adds the amount of its stage. The end of B or W removes it. Depends only on the order of actions.

    Args:
        per_stage: amount of one microbatch on each stage, for example in bytes. Defaults to 1 / v.
    """
    amounts = per_stage or [1 / program.num_chunks] * program.num_stages
    # Activations are needed until the weight gradient, so I frees nothing.
    # 1F1B on 4 ranks with 8 microbatches: peaks 4, 3, 2, 1. GPipe has 8 on every rank.
    change = {"F": 1, "I": 0, "W": -1, "B": -1}
    return tuple(
        max(accumulate((change[a.kind] * amounts[a.stage] for a in program.actions(rank)), initial=0.0))
        for rank in range(program.pp_size)
    )


def simulate(program: Program, costs: Costs) -> Timeline:
    """Simulate a program. Raises ConfigError if ranks deadlock, with the pending action of each."""
    # (result, stage, microbatch) -> time at which it exists
    # Example: 1F1B, 2 ranks, 3 microbatches, F = I = W = 1. Rank 0 runs 0F0 at 0-1 and 0F1 at 1-2, and then waits for
    # the gradient of microbatch 0. Rank 1 runs 1F0 at 1-2 and 1B0 at 2-4, so 0B0 runs at 4-6. The makespan is 12. Each
    # rank works 3 * 3 = 9 units and is idle for 3. The lower bound is 9 + 1 = 10.
    ends: dict[tuple[str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in program.ranks]
    queue: list[list[Step]] = [list(steps) for steps in program.ranks]
    if costs.overlap is None:
        queue = [list(program.actions(rank)) for rank in range(program.pp_size)]
    at, free, busy = [0] * program.pp_size, [0.0] * program.pp_size, [0.0] * program.pp_size
    progress = True
    # Advance each rank as far as its inputs exist, until no rank advances. A valid program has finished then.
    while progress:
        progress = False
        for rank, steps in enumerate(queue):
            while at[rank] < len(steps):
                block = _block(steps[at[rank]], rank, program, costs, ends)
                if block is None:
                    break
                ready, duration, actions = block
                # Idle time of the rank is `start - free[rank]`.
                start = max(free[rank], ready)
                free[rank] = start + duration
                busy[rank] += duration
                for action in actions:
                    ends[_result(action)] = free[rank]
                    spans[rank].append(Span(action, start, free[rank], paired=len(actions) > 1))
                at[rank] += 1
                progress = True
    stuck = [f"rank {r} at {queue[r][at[r]]}" for r in range(program.pp_size) if at[r] < len(queue[r])]
    if stuck:
        raise ConfigError(
            f"{program.schedule} deadlocks. These actions wait for actions that never run: {'; '.join(stuck)}",
            code="invalid_schedule",
        )
    return Timeline(program, costs, tuple(tuple(s) for s in spans), tuple(busy))


def _block(
    step: Step, rank: int, program: Program, costs: Costs, ends: dict[tuple[str, int, int], float]
) -> tuple[float, float, tuple[Action, ...]] | None:
    """Return (time when the inputs exist, duration, actions) of a step, or None while an input does not exist yet."""
    actions = step.actions
    ready = 0.0
    for action in actions:
        for key in _inputs(action, program.num_stages):
            if key not in ends:
                return None
            ready = max(ready, ends[key] + (costs.hop if program.owner[key[1]] != rank else 0.0))
    duration = sum(costs.of(action) for action in actions)
    # overlap 0.8 with F = 1 and B = 2: the pair takes 2.4 instead of 3.
    if len(actions) > 1 and costs.overlap is not None:
        duration *= costs.overlap
    return ready, duration, actions


def _result(action: Action) -> tuple[str, int, int]:
    """Return the result of an action: activations F, input gradients G (by I or B), or weight gradients W."""
    return ({"F": "F", "I": "G", "B": "G", "W": "W"}[action.kind], action.stage, action.microbatch)


def _inputs(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    kind, stage, k = action
    if kind == "F":
        return [("F", stage - 1, k)] if stage else []
    if kind == "W":
        # W follows I of the same stage and microbatch.
        return [("G", stage, k)]
    # I and B need the activations of the own forward, and the gradient from the next stage except on the last one.
    return [("F", stage, k)] + ([("G", stage + 1, k)] if stage + 1 < num_stages else [])
