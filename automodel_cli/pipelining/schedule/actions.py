"""Read the order of actions from torch's pipeline schedules. The only module with their private names (torch 2.11 to
2.15).

Schedule objects are created without a process group, with substitutes for stages. So the simulator and the drawing use
the order that the runtime executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from automodel_cli.pipelining.schedule.program import Action, Overlap, Step

_KINDS = {
    torch_schedules.FORWARD: "F",
    torch_schedules.BACKWARD_INPUT: "I",
    torch_schedules.BACKWARD_WEIGHT: "W",
    torch_schedules.FULL_BACKWARD: "B",
}
_TORCH_KINDS = {kind: torch_kind for torch_kind, kind in _KINDS.items()}


def rank_programs(torch_class: str, pp_size: int, num_microbatches: int, num_chunks: int) -> list[tuple[Step, ...]]:
    """Return the compute actions of every rank, in the order of torch's runtime. Multi-stage schedules only.

    torch's single-stage schedules are loops in code. Their published order is wrong on the last rank of 1F1B.
    """
    num_stages = pp_size * num_chunks
    # Rank 0's stages would be 0, p, 2p, ... The constructor only counts its stages, so any indices work.
    stages = [
        SimpleNamespace(
            stage_index=chunk,
            num_stages=num_stages,
            group_size=pp_size,
            group_rank=0,
            is_first=chunk == 0,
            is_last=chunk == num_stages - 1,
            submod=None,
        )
        for chunk in range(num_chunks)
    ]
    schedule_class: Any = torch_schedules.get_schedule_class(torch_class)
    # The constructor also adds sends and receives, 80% of its time for large programs. They are not needed here.
    order_only = type(schedule_class.__name__, (schedule_class,), {"_prepare_schedule_with_comms": _no_lowering})
    schedule = order_only(stages, num_microbatches, loss_fn=None, scale_grads=False)
    return [from_torch(schedule.pipeline_order[rank]) for rank in range(pp_size)]


def _no_lowering(self: object, actions: object) -> None:
    pass


def from_torch(actions: Sequence[torch_schedules._Action | None]) -> tuple[Step, ...]:
    """Convert torch's compute actions. Idle slots (None) are dropped."""
    return tuple(_step(action) for action in actions if action is not None)


def _step(action: torch_schedules._Action) -> Step:
    if action.computation_type == torch_schedules.OVERLAP_F_B:
        forward, backward = map(_action, action.sub_actions or ())
        return Overlap(forward, backward)
    return _action(action)


def _action(action: torch_schedules._Action) -> Action:
    assert action.microbatch_index is not None, f"nested pair {action}"
    return Action(_KINDS[action.computation_type], action.stage_index, action.microbatch_index)


def to_torch(steps: tuple[Step, ...]) -> list[torch_schedules._Action | None]:
    """Convert steps to torch's compute actions, for programs without a class in torch."""
    return [_torch_action(step) for step in steps]


def _torch_action(step: Step) -> torch_schedules._Action:
    actions = tuple(torch_schedules._Action(a.stage, _TORCH_KINDS[a.kind], a.microbatch) for a in step.actions)
    return actions[0] if len(actions) == 1 else torch_schedules._Action(-1, torch_schedules.OVERLAP_F_B, None, actions)
