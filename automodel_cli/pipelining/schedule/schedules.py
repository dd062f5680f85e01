"""Pipeline schedules by name, and the rules that they impose. Torch-free.

Sources (arXiv): GPipe 1811.06965; 1F1B and interleaving 2104.04473; breadth-first 2211.05953; zero bubble (ZB-H1,
ZB-H2, ZBV) 2401.10241; DualPipe 2412.19437. Schedules with a `torch_class` run as torch's own. The others are programs
of this package on torch's runtime.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.stage_ranks import ScheduleKind, Style


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    Attributes:
        name: torch's name if torch has the schedule. Names are case-insensitive.
        option: name in the config group.
        kind: "single" has one stage per rank, "multi" several.
        style: placement of stages. "v" needs exactly two stages per rank.
        splits_backward: input and weight gradients are separate actions. This fills the bubble, but is incompatible
            with hooks at the end of a backward.
    """

    name: str
    option: str
    kind: ScheduleKind
    style: Style
    splits_backward: bool
    torch_class: str | None
    summary: str


SCHEDULES = (
    Schedule("GPipe", "gpipe", "single", "loop", False, "GPipe", "all forwards, then all backwards"),
    Schedule("1F1B", "1f1b", "single", "loop", False, "1F1B", "one forward, one backward after the warm-up"),
    Schedule(
        "Interleaved1F1B",
        "interleaved_1f1b",
        "multi",
        "loop",
        False,
        "Interleaved1F1B",
        "1F1B over several chunks per rank, depth first",
    ),
    Schedule(
        "LoopedBFS",
        "looped_bfs",
        "multi",
        "loop",
        False,
        "LoopedBFS",
        "GPipe over several chunks per rank, breadth first",
    ),
    Schedule(
        "ZB-H1",
        "zb_h1",
        "single",
        "loop",
        True,
        None,
        "1F1B with weight gradients in the bubble, 1F1B's peak on every rank",
    ),
    Schedule(
        "ZB-H2",
        "zb_h2",
        "single",
        "loop",
        True,
        None,
        "ZB-H1 with twice the warm-up: no bubble inside a rank, twice the peak",
    ),
    Schedule(
        "InterleavedZeroBubble",
        "interleaved_zb",
        "multi",
        "loop",
        True,
        "InterleavedZeroBubble",
        "ZB-H1 over several chunks per rank",
    ),
    Schedule(
        "ZBVZeroBubble",
        "zbv",
        "multi",
        "v",
        True,
        "ZBVZeroBubble",
        "zero bubble on a V: two chunks per rank, 1F1B's peak",
    ),
    Schedule(
        "DualPipeV",
        "dualpipev",
        "multi",
        "v",
        True,
        "DualPipeV",
        "forward and backward of two microbatches paired on a V",
    ),
)
_BY_NAME = {key.lower(): s for s in SCHEDULES for key in (s.name, s.option)}


def find_schedule(name: str) -> Schedule:
    """Return the schedule with a name of torch or of the config group. Raises ConfigError with the valid names."""
    schedule = _BY_NAME.get(name.lower())
    if schedule is None:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.5)
        raise ConfigError(
            f"schedule={name!r} must be one of: {', '.join(s.name for s in SCHEDULES)}",
            code="invalid_choice",
            keys=("schedule",),
            fix=f"schedule={_BY_NAME[near[0]].name}" if near else None,
        )
    return schedule


def check_schedule(
    schedule: Schedule, pp_size: int, num_microbatches: int, num_chunks: int, group_size: int | None = None
) -> None:
    """Raise ConfigError if the schedule does not support these numbers.

    Args:
        num_chunks: stages per rank.
        group_size: microbatches per chunk and round of Interleaved1F1B. None: torch's grouping.
    """
    name, p, m, v = schedule.name, pp_size, num_microbatches, num_chunks
    if p < 1 or m < 1 or v < 1:
        raise ConfigError(
            f"{name}: pp_size={p}, num_microbatches={m} and {v} stages per rank must be at least 1", code="out_of_range"
        )
    if schedule.kind == "single" and v != 1:
        raise ConfigError(
            f"schedule={name} needs exactly 1 stage per rank, not {v}",
            code="stage_count",
            keys=("schedule",),
            fix="schedule=Interleaved1F1B, or fewer stages",
        )
    if schedule.style == "v" and v != 2:
        raise ConfigError(
            f"schedule={name} places stages on a V and needs exactly 2 stages per rank, not {v}",
            code="stage_count",
            keys=("schedule",),
            fix=f"schedule=Interleaved1F1B, or {2 * p} stages",
        )
    if group_size is not None:
        _check_group(schedule, p, m, group_size)
    elif name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        # torch runs rounds of m / rounds microbatches. With p = 4, m = 10 has 2 rounds of 5. m = 13 has 3 rounds and is
        # rejected.
        rounds = max(1, m // p)
        if m % rounds:
            near = [k for k in (m - m % p, m + p - m % p) if k > 0]
            raise _microbatches(
                "not_divisible",
                f"{name} splits the {m} microbatches into max(1, {m} // pp_size) = {rounds} equal rounds, but "
                f"{m} % {rounds} = {m % rounds} with pp_size={p}",
                near[0],
            )
    if name == "1F1B" and m < p:
        raise _microbatches(
            "out_of_range",
            f"1F1B needs at least as many microbatches as stages: {m} < {p}",
            p,
            " (GPipe and ZB-H1 run with fewer)",
        )
    if name == "DualPipeV" and m < 2 * p:
        raise _microbatches(
            "out_of_range",
            f"DualPipeV needs at least 2 * pp_size microbatches: {m} < {2 * p}",
            2 * p,
            " (ZBVZeroBubble runs with fewer)",
        )


def _microbatches(code: str, message: str, num_microbatches: int, other: str = "") -> ConfigError:
    fix = f"{num_microbatches} microbatches per step (train.global_batch_size and train.microbatch_size){other}"
    return ConfigError(message, code=code, keys=("train.global_batch_size", "train.microbatch_size"), fix=fix)


def _check_group(schedule: Schedule, p: int, m: int, g: int) -> None:
    if schedule.name != "Interleaved1F1B":
        raise ConfigError(
            f"microbatch_group_size={g} has no effect with schedule={schedule.name}. Only Interleaved1F1B uses it",
            code="no_effect",
            keys=("microbatch_group_size",),
            fix="microbatch_group_size=null",
        )
    if not p <= g <= m:
        raise ConfigError(
            f"microbatch_group_size={g} must be at least pp_size={p} and at most the {m} microbatches of a step",
            code="out_of_range",
            keys=("microbatch_group_size",),
            fix=f"microbatch_group_size={p}" if m >= p else f"microbatch_group_size=null, or at least {p} microbatches",
        )
    if 0 < m % g < p:
        # A last group with fewer than p microbatches would need its own results before they are computed.
        legal = [k for k in range(p, m + 1) if m % k == 0 or m % k >= p]
        raise ConfigError(
            f"microbatch_group_size={g} leaves a last group of {m % g} of {m} microbatches, which is less than "
            f"pp_size={p}",
            code="not_divisible",
            keys=("microbatch_group_size",),
            fix=f"microbatch_group_size={min(legal, key=lambda k: (abs(k - g), k))}",
        )


def check_composition(
    schedule: Schedule,
    *,
    reshard_after_forward: bool = False,
    ddp_wrapper: bool = False,
    compiled_wrapper: bool = False,
    checkpoint_partial: bool = False,
) -> None:
    """Raise ConfigError for settings that a split backward does not support.

    With resharding or a DDP wrapper, gradients would be wrong without an error (relative error 2e-2 to 3e-2).
    """
    if not schedule.splits_backward:
        return
    wrong: list[tuple[bool, str, str]] = [
        (
            reshard_after_forward,
            "reshard_after_forward=true frees parameters before the weight gradients, which are wrong then",
            "fully_shard(..., reshard_after_forward=False) in parallelize_fn",
        ),
        (
            ddp_wrapper,
            "a DDP wrapper reduces gradients before the weight gradients exist, and they are wrong then",
            "replicate, which reduces once after the step",
        ),
        (compiled_wrapper, "torch.compile wrappers are not supported", "module.compile() in place, per layer"),
        (
            checkpoint_partial,
            "releasing outputs and partial recomputation are not supported with it",
            "schedule=1F1B, or Interleaved1F1B",
        ),
    ]
    for used, text, fix in wrong:
        if used:
            raise ConfigError(
                f"schedule={schedule.name} splits the backward, but {text}",
                code="unsupported_combination",
                keys=("schedule",),
                fix=fix,
            )
