"""Messages about ranks that wait: their collectives and their stacks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TypedDict

_TORCH = f"{os.sep}torch{os.sep}"
_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"


class RankState(TypedDict):
    """What a rank publishes about itself: a counter of signs of life, and where it is since `seconds`."""

    rank: int
    beats: int
    step: int
    where: str
    seconds: float
    at: str
    waits: bool
    host: str
    pid: int


def sentence(
    before: Mapping[int, RankState],
    after: Mapping[int, RankState],
    recorded: bytes | None,
    logs: Path,
    *,
    reached: bool = True,
) -> str:
    """Return a message with the hanging rank and the collective that the others wait in.

    `before` and `after`: published states, some beats apart. `after` holds only this rank if the store was not
    `reached`.
    """
    if not reached:
        (mine,) = after.values()
        return (
            f"the store of the ranks on {os.environ.get('MASTER_ADDR', 'the first host')} does not answer rank "
            f"{mine['rank']} on {mine['host']}: the process that holds it is stopped or has ended, or its host cannot "
            f"be reached from here; rank {mine['rank']} is in {mine['at']} (step {mine['step']})"
        )
    silent = [rank for rank in after if after[rank]["beats"] == before.get(rank, {"beats": -1})["beats"]]
    silent = silent if len(silent) < len(after) else []
    away = [rank for rank, state in after.items() if not state["waits"]]
    rank = min(silent or away or after, key=lambda r: (after[r]["step"], -after[r]["seconds"]))
    state, others = after[rank], [other for r, other in after.items() if r != rank]
    quiet = "tells nothing any more (stopped, in C code, or its host cannot be reached)"
    how = quiet if rank in silent else f"is in {state['at']}"
    text = (
        f"rank {rank} (process {state['pid']} on {state['host']}) stands still: {how}, last heard of in step "
        f"{state['step']}, {state['where']}, {max(s['seconds'] for s in after.values()):.0f} s ago"
    )
    waiting = [other for other in others if other["waits"]]
    if waiting:
        collective = last_collective(recorded) if recorded is not None else None
        known = f" ({collective})" if collective else ""
        who = "the other one waits" if len(others) == 1 else f"{len(waiting)} of the {len(others)} others wait"
        text += f"; {who} in {waiting[0]['at']}{known}"
    return f"{text}; stacks of the ranks: {logs}/rank-N.stacks"


def last_collective(recorded: bytes) -> str | None:
    """Return the newest unfinished entry of torch's flight recorder: operation, sizes and group."""
    entries = [entry for entry in json.loads(recorded).get("entries", []) if not entry.get("retired", False)]
    if not entries:
        return None
    entry = entries[-1]
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in entry.get("input_sizes", []))
    group = "/".join(name for name in entry.get("process_group", []) if name)
    return f"{entry.get('profiling_name', 'a collective')} of {sizes}, group {group}".replace(" of ,", ",")


def waits(frame: FrameType | None) -> bool:
    """Return whether the innermost Python frame belongs to torch.distributed, or waits for the device in a step."""
    if frame is None:
        return False
    if _DISTRIBUTED in frame.f_code.co_filename:
        return True
    while frame.f_back is not None and _TORCH in frame.f_code.co_filename:  # Python code of a CUDA event
        frame = frame.f_back
    return frame.f_code.co_name == "wait_for_device"


def frame_text(frame: FrameType | None) -> str:
    """Return the innermost frame, and the first frame outside of torch that called it."""
    if frame is None:
        return "no Python frame"
    inner = f"{frame.f_code.co_name} ({_short(frame)})"
    caller: FrameType | None = frame
    while caller is not None and _TORCH in caller.f_code.co_filename:
        caller = caller.f_back
    if caller is None or caller is frame:
        return inner
    return f"{inner}, called by {caller.f_code.co_name} ({_short(caller)})"


def _short(frame: FrameType) -> str:
    parts = Path(frame.f_code.co_filename).parts
    return f"{'/'.join(parts[-2:])}:{frame.f_lineno}"
