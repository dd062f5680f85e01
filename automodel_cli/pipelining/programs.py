"""Schedule programs: per rank, the ordered list of forwards and backwards it executes.

A `Program` is what the simulator times, the drawing shows and the runtime executes. Torch's multi-stage schedules are
read off torch's own objects; GPipe, 1F1B, grouped interleaving, ZB-H1 and ZB-H2 are generated here. This module imports
torch only for the former.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.megatron import compute_order
from automodel_cli.pipelining.schedules import Schedule, check_schedule, find_schedule
from automodel_cli.pipelining.split import stage_owners


class Action(NamedTuple):
    """One unit of work.

    Kinds: F forward, I input gradients, W weight gradients, B both. Prints as torch's CSV does: `2F0`.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward of different microbatches that may run at the same time (DualPipeV)."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap


@dataclass(frozen=True)
class Program:
    """The steps of every rank for one optimizer step of `num_microbatches`. `owner[s]` is the rank of stage s."""

    schedule: str
    num_microbatches: int
    owner: tuple[int, ...]
    ranks: tuple[tuple[Step, ...], ...]

    @property
    def pp_size(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.owner)

    @property
    def num_chunks(self) -> int:
        """Stages per rank."""
        return self.num_stages // self.pp_size

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages this is, in pipeline order."""
        return self.owner[:stage].count(self.owner[stage])

    def actions(self, rank: int) -> list[Action]:
        """The steps of a rank with pairs taken apart, forward first (torch runs them that way)."""
        return [action for step in self.ranks[rank] for action in (step if isinstance(step, Overlap) else (step,))]

    def to_csv(self, path: Path) -> None:
        """One row per rank in torch's compute-only format."""
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([str(step) for step in steps] for steps in self.ranks)


def build_program(
    schedule: Schedule | str,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    group_size: int | None = None,
    extra_warmup: int = 0,
) -> Program:
    """The program of a schedule. Raises ConfigError for what `check_schedule` refuses.

    `group_size` (Interleaved1F1B): microbatches per chunk and round; None is torch's grouping, m // max(1, m // p).
    `extra_warmup` 1 (with `group_size`) runs one more forward before the first backward, as the overlapped expert
    all-to-all does.
    """
    schedule = find_schedule(schedule) if isinstance(schedule, str) else schedule
    p, m, v = pp_size, num_microbatches, num_chunks
    check_schedule(schedule, p, m, v, group_size)
    if extra_warmup and group_size is None:
        raise ConfigError("extra_warmup needs Interleaved1F1B with microbatch_group_size")
    ranks: Iterable[tuple[Step, ...]]
    if schedule.name == "GPipe":
        ranks = [_gpipe(rank, m) for rank in range(p)]
    elif schedule.name == "1F1B":
        ranks = [_from_megatron(compute_order(m, p, rank), p, rank) for rank in range(p)]
    elif schedule.name == "ZB-H1":
        ranks = [_zero_bubble(rank, m, warmup=p - 1 - rank, delay=rank) for rank in range(p)]
    elif schedule.name == "ZB-H2":
        ranks = [_zero_bubble(rank, m, warmup=2 * (p - 1 - rank), delay=2 * rank) for rank in range(p)]
    elif group_size is not None:
        orders = [compute_order(m, p, rank, v, group_size, extra_warmup=extra_warmup) for rank in range(p)]
        ranks = [_from_megatron(order, p, rank) for rank, order in enumerate(orders)]
    else:
        from automodel_cli.pipelining.torch_schedules import rank_programs

        assert schedule.torch_class is not None, f"no generator for {schedule.name}"
        ranks = rank_programs(schedule.torch_class, p, m, v)
    return Program(schedule.name, m, stage_owners(p, p * v, schedule.style), tuple(ranks))


def _gpipe(stage: int, m: int) -> tuple[Step, ...]:
    return tuple(Action(kind, stage, k) for kind in "FB" for k in range(m))


def _from_megatron(order: Sequence[tuple[str, int, int]], p: int, rank: int) -> tuple[Step, ...]:
    return tuple(Action(kind, chunk * p + rank, microbatch) for kind, microbatch, chunk in order)


def _zero_bubble(stage: int, m: int, *, warmup: int, delay: int) -> tuple[Step, ...]:
    """1F1B with split backwards: a weight gradient runs once more than `delay` of them wait (2401.10241)."""
    steps = [Action("F", stage, k) for k in range(min(warmup, m))]
    forwards, weights = len(steps), 0
    for k in range(m):
        if forwards < m:
            steps.append(Action("F", stage, forwards))
            forwards += 1
        steps.append(Action("I", stage, k))
        if k + 1 - weights > delay:
            steps.append(Action("W", stage, weights))
            weights += 1
    return tuple(steps + [Action("W", stage, k) for k in range(weights, m)])


def forward_only_program(program: Program) -> Program:
    """The forwards alone: a validation pass. In rounds of p microbatches, one stage of the rank after another, so
    that a rank has work while its microbatches are on other ranks."""
    p, m = program.pp_size, program.num_microbatches
    stages = [[s for s, owner in enumerate(program.owner) if owner == rank] for rank in range(p)]
    rounds = [range(start, min(start + p, m)) for start in range(0, m, p)]
    ranks = tuple(tuple(Action("F", s, k) for group in rounds for s in own for k in group) for own in stages)
    return Program(f"{program.schedule}, forward only", program.num_microbatches, program.owner, ranks)


_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_OVERLAP = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")


def read_csv(path: Path | str) -> Program:
    """A program from a file in torch's compute-only CSV format: one row per rank, empty cells are ignored.

    The ranks' stages define the placement. Raises ConfigError, naming row and cell, for what is no action, and for an
    incomplete program.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"pp_schedule_csv={path} is no file", keys=("pp_schedule_csv",))
    ranks: list[tuple[Step, ...]] = []
    with path.open(newline="") as file:
        for rank, row in enumerate(csv.reader(file)):
            ranks.append(
                tuple(
                    _parse(cell.strip(), f"{path}: rank {rank}, cell {k}") for k, cell in enumerate(row) if cell.strip()
                )
            )
    owner: dict[int, int] = {}
    microbatches = 0
    for rank in range(len(ranks)):
        for action in Program("", 0, (), tuple(ranks)).actions(rank):
            if owner.setdefault(action.stage, rank) != rank:
                raise ConfigError(f"{path}: stage {action.stage} runs on rank {owner[action.stage]} and on rank {rank}")
            microbatches = max(microbatches, action.microbatch + 1)
    if not owner or sorted(owner) != list(range(len(owner))) or len(owner) % len(ranks):
        raise ConfigError(f"{path}: stages {sorted(owner)} on {len(ranks)} ranks; need 0..S-1, equally many per rank")
    program = Program(path.name, microbatches, tuple(owner[s] for s in range(len(owner))), tuple(ranks))
    check_complete(program)
    return program


def _parse(cell: str, where: str) -> Step:
    if pair := _OVERLAP.fullmatch(cell):
        forward, backward = (_parse(text, where) for text in pair.groups())
        assert isinstance(forward, Action) and isinstance(backward, Action)
        return Overlap(forward, backward)
    if match := _ACTION.fullmatch(cell):
        return Action(match[2], int(match[1]), int(match[3]))
    raise ConfigError(
        f"{where}: {cell!r} is no action; examples: 0F3, 1B0, 2I1, 2W1, (0F4;1B2)OVERLAP_F_B", keys=("pp_schedule_csv",)
    )


def check_complete(program: Program) -> None:
    """Every stage runs every microbatch exactly once forward, and once backward as B or as I then W.

    Raises ConfigError with the action.
    """
    for rank in range(program.pp_size):
        done: set[Action] = set()
        for action in program.actions(rank):
            kind, stage, k = action
            if (
                action in done
                or (kind in "IW" and Action("B", stage, k) in done)
                or (kind == "B" and Action("I", stage, k) in done)
            ):
                raise ConfigError(f"{program.schedule}: {action} repeats work on rank {rank}")
            needs = {"F": None, "I": "F", "B": "F", "W": "I"}[kind]
            if needs and Action(needs, stage, k) not in done:
                raise ConfigError(f"{program.schedule}: {action} runs before {Action(needs, stage, k)} on rank {rank}")
            done.add(action)
        for stage in (s for s, owner in enumerate(program.owner) if owner == rank):
            for k in range(program.num_microbatches):
                if Action("F", stage, k) not in done:
                    raise ConfigError(f"{program.schedule}: {Action('F', stage, k)} is missing on rank {rank}")
                if Action("B", stage, k) not in done and Action("W", stage, k) not in done:
                    raise ConfigError(f"{program.schedule}: the backward of microbatch {k} is missing on stage {stage}")
