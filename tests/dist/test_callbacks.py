"""Callbacks of a user in real runs: what they hear, what they add, what a checkpoint keeps of them, how they fail."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from automodel_cli.training.checkpoint.directory import CheckpointDir
from tests.dist.harness import launch
from tests.dist.sessions import session
from tests.e2e.command import TINY, metrics

pytestmark = pytest.mark.slow

SFT = TINY.format(family="llama").replace("num_train: 400", "num_train: 40")
FEW = ("train.max_steps=4", "checkpoint.every=2", "validation.every=2", "validation.at_start=false")
QUIET = ("logging.report=false", "logging.console=plain")
MINE = '''
import json, os
from automodel_cli.training.callback import Callback

class Count(Callback):
    """Counts label tokens over the whole training, however often it is resumed."""

    def __init__(self, fail="", at=0, on_rank=0, column="label_tokens_so_far"):
        self.fail, self.at, self.rank, self.column = fail, at, on_rank, column

    def tell(self, run, hook, step, what):
        rank = int(os.environ.get("RANK", "0"))
        with open(run.run_dir / f"heard-{rank}.jsonl", "a") as file:
            file.write(json.dumps([hook, step, what]) + "\\n")
        if hook == self.fail and step == self.at and rank == self.rank:
            raise ValueError("the disk of my callback is full")

    def on_start(self, run, state):
        self.count = state or 0
        self.tell(run, "on_start", run.first_step, state)

    def on_step(self, run, step, values):
        self.count += int(values["num_label_tokens"])
        self.tell(run, "on_step", step, len(list(run.model.parts)))
        return {self.column: self.count}

    def on_validation(self, run, step, values):
        self.tell(run, "on_validation", step, sorted(values))
        return {"val_twice": 2 * values["val_loss"]}

    def on_checkpoint(self, run, step):
        self.tell(run, "on_checkpoint", step, None)
        return {1, 2} if self.fail == "json" else self.count

    def on_end(self, run, succeeded):
        self.tell(run, "on_end", None, succeeded)
'''


def _run(rank: int, world: int, folder: Path, options: str, run: str | None, *overrides: str) -> None:
    count = "callbacks=[]" if options == "none" else f"callbacks=[{{_target_: mine.Count{options}}}]"
    with session(folder, SFT, *FEW, *QUIET, count, *overrides, run=run, trust=("mine",)) as opened:
        for step, batches in opened.steps():
            opened.train(step, batches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with `mine.py`, and an uninterrupted run."""
    folder = tmp_path_factory.mktemp("callbacks")
    (folder / "mine.py").write_text(MINE)
    launch(_run, 1, folder, "", None, "run_name=whole", process_group=False)
    return folder


def heard(folder: Path, run: str, rank: int = 0) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "runs" / run / f"heard-{rank}.jsonl").read_text().splitlines()]


def column(folder: Path, run: str, name: str) -> list[float]:
    return [row[name] for row in metrics(folder / "runs" / run) if name in row]


def test_they_hear_of_everything_on_every_rank_and_add_columns(folder: Path) -> None:
    launch(_run, 2, folder, "", None, "run_name=heard", "mesh.dp_size=2", process_group=False)
    counts = column(folder, "heard", "num_label_tokens")
    assert column(folder, "heard", "label_tokens_so_far") == [sum(counts[: i + 1]) for i in range(4)]
    assert column(folder, "heard", "val_twice") == [2 * value for value in column(folder, "heard", "val_loss")]
    of_two = [["on_validation", 2, ["val_loss"]], ["on_checkpoint", 2, None]]
    expected = [["on_start", 0, None], ["on_step", 1, 1], ["on_step", 2, 1], *of_two, ["on_step", 3, 1]]
    expected += [["on_step", 4, 1], *([hook, 4, what] for hook, _, what in of_two), ["on_end", None, True]]
    assert heard(folder, "heard", 0) == heard(folder, "heard", 1) == expected


@pytest.mark.parametrize("hook", ["on_step", "on_checkpoint"])
def test_a_failing_one_is_named_and_the_run_goes_on_from_its_checkpoint(folder: Path, hook: str) -> None:
    step = {"on_step": 3, "on_checkpoint": 4}[hook]
    with pytest.raises(
        Exception, match=rf"mine.Count failed in {hook} at step {step}: ValueError: the disk of my"
    ) as e:
        launch(_run, 1, folder, f", fail: {hook}, at: {step}", None, f"run_name={hook}", process_group=False)
    assert "mine.py:16" in str(e.value) and "automodel resume" in str(e.value)
    assert heard(folder, hook)[-1] == ["on_end", None, False]
    newest = CheckpointDir(folder / "runs" / hook / "checkpoints").latest()
    assert newest is not None and newest.name == "step-000002"
    launch(_run, 1, folder, "", hook, process_group=False)
    for name in ("loss", "label_tokens_so_far", "val_twice"):
        assert column(folder, hook, name) == column(folder, "whole", name)
    assert ["on_start", 2, column(folder, "whole", "label_tokens_so_far")[1]] in heard(folder, hook)


def test_one_rank_that_fails_ends_all(folder: Path) -> None:
    options = ", fail: on_step, at: 3, on_rank: 1"
    with pytest.raises(Exception, match=r"exit codes \[1, 1\]"):
        launch(_run, 2, folder, options, None, "run_name=one", "mesh.dp_size=2", process_group=False)
    log = (folder / "runs" / "one" / "logs" / "rank-1.log").read_text()
    assert "callback mine.Count failed in on_step at step 3" in log
    newest = CheckpointDir(folder / "runs" / "one" / "checkpoints").latest()
    assert newest is not None and newest.name == "step-000002"


def _printed(rank: int, world: int, *arguments: object) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        _run(rank, world, *arguments)  # type: ignore[arg-type]
    return printed.getvalue()


def test_a_dropped_callback_is_said(folder: Path) -> None:
    shutil.copytree(folder / "runs" / "whole", folder / "runs" / "dropped", symlinks=True)
    words = ("train.max_steps=5", "train.extend_schedule=stretch")
    said = launch(_printed, 1, folder, "none", "dropped", *words, process_group=False)
    assert "callback mine.Count" in said
    assert len(column(folder, "dropped", "loss")) == 5
