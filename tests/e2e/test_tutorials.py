"""The tutorials as a reader follows them: every file written and every command run, page after page in one folder."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import automodel, environment
from tests.pages import ROOT, blocks

pytestmark = pytest.mark.nightly

PAGES = [
    "chat",
    "new_tokens",
    "lora",
    "quantization",
    "preferences",
    "rewards",
    "pictures",
    "cluster",
]  # each goes on from the first one's run


def follow(page: str, folder: Path) -> str:
    """What all commands of a page print; fails where one does. Those under a comment (`needs GPUs`) are left out."""
    said = []
    for block in blocks(ROOT / "docs" / "tutorials" / f"{page}.md"):
        if block.title:
            (folder / block.title).write_text(block.text)
        if block.language != "bash" or block.note:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            if program == "automodel":
                done = automodel(folder, *arguments, timeout=900)
            else:
                assert program == "python", line
                variables = environment(folder) | {"PATH": os.environ["PATH"]}
                command = [sys.executable, *arguments]
                done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{page}: {line}\n{done.stdout}{done.stderr}"
            said.append(done.stdout)
    return "".join(said)


def last(folder: Path, run: str, key: str) -> float:
    rows = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if row.get(key) is not None][-1]


def test_every_page_can_be_followed_and_teaches_what_it_says(tmp_path: Path) -> None:
    said = {page: follow(page, tmp_path) for page in PAGES}
    assert said["chat"].count("Which day is 2 after Friday? ->") == 1
    assert last(tmp_path, "days", "val_loss") < 0.3
    assert last(tmp_path, "marked", "val_loss") < 0.3
    assert "<day>" in said["new_tokens"].rpartition("Which day is 2 after Friday? ->")[2]
    assert (tmp_path / "runs" / "top" / "export").is_dir() and " trained " in said["chat"]
    assert last(tmp_path, "adapters", "val_loss") < 0.3
    assert (tmp_path / "runs" / "adapters" / "export" / "adapter").is_dir()
    assert int(said["lora"].split()[-1]) == 2 * 8 * 8 * (64 + 64 + 32 + 64)
    assert last(tmp_path, "further", "val_loss") < 0.3
    figures = json.loads((tmp_path / "runs" / "quantized" / "run.json").read_text())["numbers"]
    before, after = (float(figures[f"held-out loss, quantized {when} training"]) for when in ("before", "after"))
    assert after < before < 2
    assert "quantization_config" in json.loads((tmp_path / "runs" / "quantized" / "export" / "config.json").read_text())
    assert (tmp_path / "runs" / "complete" / "export" / "adapter").is_dir()
    assert last(tmp_path, "pairs", "val_accuracy") > 0.9
    assert last(tmp_path, "rewards", "val_reward") > 0.8
    assert last(tmp_path, "pictures", "val_accuracy") > 0.9
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
