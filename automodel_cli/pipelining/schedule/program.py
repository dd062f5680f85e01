"""Schedule programs: the ordered forwards and backwards of every rank. Torch-free.

A `Program` is timed by the simulator, drawn, and executed by the runtime. `programs.build_program` creates it from a
schedule, `read_csv` from a file.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from automodel_cli.config.errors import ConfigError


class Action(NamedTuple):
    """One unit of work. Printed as in torch's CSV format, for example `2F0`.

    Kinds: F forward, I input gradients, W weight gradients, B both.
    """

    kind: str
    stage: int
    microbatch: int

    @property
    def actions(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward of different microbatches that may run concurrently (DualPipeV)."""

    forward: Action
    backward: Action

    @property
    def actions(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap


@dataclass(frozen=True)
class Program:
    """The steps of every rank for one optimizer step. `owner[s]` is the rank of stage s."""

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

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are separate actions anywhere."""
        return any(action.kind == "W" for rank in range(self.pp_size) for action in self.actions(rank))

    def chunk_of(self, stage: int) -> int:
        """Return the index of a stage among the stages of its rank, in pipeline order."""
        return self.owner[:stage].count(self.owner[stage])

    def actions(self, rank: int) -> list[Action]:
        """Return the actions of a rank. Pairs are split, forward first, as torch runs them."""
        return [action for step in self.ranks[rank] for action in step.actions]

    def to_csv(self, path: Path) -> None:
        """Write one row per rank in torch's compute-only format."""
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([str(step) for step in steps] for steps in self.ranks)


def forward_only_program(program: Program) -> Program:
    """Return a program of forwards only, for validation.

    Runs rounds of p microbatches, one stage of the rank after another. A rank then has work while its microbatches are
    on other ranks.
    """
    # Example: 2 ranks with 2 stages each and 4 microbatches. Rank 0 runs 0F0 0F1 2F0 2F1, then 0F2 0F3 2F2 2F3.
    p, m = program.pp_size, program.num_microbatches
    stages = [[s for s, owner in enumerate(program.owner) if owner == rank] for rank in range(p)]
    rounds = [range(start, min(start + p, m)) for start in range(0, m, p)]
    ranks = tuple(tuple(Action("F", s, k) for group in rounds for s in own for k in group) for own in stages)
    return Program(f"{program.schedule}, forward only", program.num_microbatches, program.owner, ranks)


def unsplit_backwards(program: Program) -> Program:
    """Return a program that computes weight gradients together with input gradients."""

    def whole(step: Step) -> Step:
        # B takes the place of I, because the previous stage waits for the input gradient. W is dropped.
        match step:
            case Overlap(forward, backward):
                return Overlap(forward, backward._replace(kind="B"))
            case Action(kind="I"):
                return step._replace(kind="B")
        return step

    ranks = tuple(tuple(whole(step) for step in steps if step.actions[0].kind != "W") for steps in program.ranks)
    return Program(f"{program.schedule}, whole backwards", program.num_microbatches, program.owner, ranks)


_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_OVERLAP = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")


def read_csv(path: Path | str) -> Program:
    """Read a program in torch's compute-only CSV format: one row per rank. Empty cells are ignored.

    The stages in the rows determine the placement. Raises ConfigError with row and cell of an invalid action, and for
    an incomplete program.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"schedule_csv={path} does not exist or is not a file", code="missing_file", keys=("schedule_csv",)
        )
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
        # An unnamed program only to split pairs. Microbatches and owners are what this loop determines.
        for action in Program("", 0, (), tuple(ranks)).actions(rank):
            if owner.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"{path}: stage {action.stage} runs on two ranks, {owner[action.stage]} and {rank}",
                    code="invalid_schedule",
                    keys=("schedule_csv",),
                )
            microbatches = max(microbatches, action.microbatch + 1)
    if not owner or sorted(owner) != list(range(len(owner))) or len(owner) % len(ranks):
        raise ConfigError(
            f"{path}: stages {sorted(owner)} on {len(ranks)} ranks must be 0..S-1, with the same number on every rank",
            code="invalid_schedule",
            keys=("schedule_csv",),
        )
    program = Program(path.name, microbatches, tuple(owner[s] for s in range(len(owner))), tuple(ranks))
    check_complete(program)
    return program


def _parse(cell: str, where: str) -> Step:
    if _OVERLAP.fullmatch(cell):
        forward, backward = map(_action, _ACTION.finditer(cell))
        return Overlap(forward, backward)
    if match := _ACTION.fullmatch(cell):
        return _action(match)
    raise ConfigError(
        f"{where}: {cell!r} is not an action. Examples: 0F3, 1B0, 2I1, 2W1, (0F4;1B2)OVERLAP_F_B",
        code="invalid_schedule",
        keys=("schedule_csv",),
    )


def _action(match: re.Match[str]) -> Action:
    return Action(match[2], int(match[1]), int(match[3]))


def check_complete(program: Program) -> None:
    """Raise ConfigError unless every stage runs each microbatch once forward, and once backward as B or as I then W."""
    for rank in range(program.pp_size):
        done: set[Action] = set()
        for action in program.actions(rank):
            kind, stage, k = action
            if (
                action in done
                or (kind in "IW" and Action("B", stage, k) in done)
                or (kind == "B" and Action("I", stage, k) in done)
            ):
                raise ConfigError(f"{program.schedule}: {action} repeats work on rank {rank}", code="invalid_schedule")
            # Dependencies inside a stage. Those between stages are checked by the simulator, which finds deadlocks.
            needs = {"F": None, "I": "F", "B": "F", "W": "I"}[kind]
            if needs and Action(needs, stage, k) not in done:
                raise ConfigError(
                    f"{program.schedule}: {action} must run after {Action(needs, stage, k)} on rank {rank}",
                    code="invalid_schedule",
                )
            done.add(action)
        for stage in (s for s, owner in enumerate(program.owner) if owner == rank):
            for k in range(program.num_microbatches):
                if Action("F", stage, k) not in done:
                    raise ConfigError(
                        f"{program.schedule}: {Action('F', stage, k)} is missing on rank {rank}",
                        code="invalid_schedule",
                    )
                if Action("B", stage, k) not in done and Action("W", stage, k) not in done:
                    raise ConfigError(
                        f"{program.schedule}: the backward of microbatch {k} is missing on stage {stage}",
                        code="invalid_schedule",
                    )
