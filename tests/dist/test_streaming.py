"""Streamed runs under pipeline, tensor and context parallelism, against one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.harness import launch
from tests.dist.sessions import session, train
from tests.e2e.command import TINY, curve

STEPS = ("train.max_steps=4", "logging.report=false", "logging.console=plain", "checkpoint.every=null")
LAYOUTS = {
    "pp2": ("mesh.pp_size=2", "pipeline=1f1b"),
    "tp2": ("mesh.tp_size=2",),
    "cp2": ("mesh.cp_size=2",),
}


def _streamed(rank: int, world: int, folder: Path, *overrides: str) -> None:
    text = "\n".join(line for line in TINY.format(family="llama").splitlines() if "ChatTasks" not in line)
    text = text.replace("data:", "data:\n  path: rows.jsonl\n  streaming: {block_rows: 8}")
    with session(folder, text, *STEPS, *overrides) as opened:
        train(opened)


@pytest.mark.slow
def test_layouts_read_the_stream_of_one_process(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes " * (1 + number % 9)}]
        for number in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    launch(_streamed, 1, tmp_path, "run_name=one", process_group=False)
    want = curve(tmp_path / "runs/one")
    assert len(want) == 4 and len(set(want)) == 4
    for name, layout in LAYOUTS.items():
        launch(_streamed, 2, tmp_path, f"run_name={name}", *layout, process_group=False)
        assert curve(tmp_path / "runs" / name) == pytest.approx(want, rel=1e-5), name
