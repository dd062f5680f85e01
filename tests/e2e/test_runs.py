"""Finding, comparing and clearing runs, as a user types it, on runs of the real command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_cli.runs.lock import hold
from tests.e2e.command import automodel, environment, write_config
from tests.errors import assert_error
from tests.unit.cli.test_main import PROBE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`first` ran 6 steps; `second`, its copy, went on from step 2 with another rate; `broken` failed."""
    folder = tmp_path_factory.mktemp("runs")
    write_config(folder)
    short = ("train.max_steps=6", "checkpoint.every=2", "lr_scheduler=constant", "data.generator.num_validation=4")
    done = automodel(
        folder, "finetune", "llm", "-c", "tiny.yaml", *short, "run_name=first", "checkpoint.keep_latest_k=null"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = folder / "runs/first", folder / "runs/second"
    shutil.copytree(first, second, symlinks=True)
    for step in (4, 6):
        shutil.rmtree(second / f"checkpoints/step-{step:06}")
    done = automodel(folder, "resume", "second", "optimizer.lr=0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    done = automodel(folder, "tiny.yaml", *short, "run_name=broken", "optimizer.lr=1e30")
    assert done.returncode != 0
    return folder


def test_ls_has_a_line_for_each_run_with_its_state_and_last_numbers(home: Path) -> None:
    found = automodel(home, "runs", "ls")
    assert found.returncode == 0, found.stderr
    lines = {line.split()[0]: line.split() for line in found.stdout.splitlines()[2:]}
    last = json.loads((home / "runs/first/metrics.jsonl").read_text().splitlines()[-2])
    assert lines["first"][1:5] == ["sft", "finished", "6/6", f"{last['loss']:.4g}"]
    assert lines["broken"][2] == "failed"
    rows = [json.loads(line) for line in automodel(home, "runs", "ls", "--json").stdout.splitlines()]
    assert {row["folder"]: row["state"] for row in rows}["runs/second"] == "finished"


def test_a_run_goes_on_while_its_lock_is_held_and_failed_if_it_left_no_word(home: Path) -> None:
    run = home / "runs/gone"
    shutil.copytree(home / "runs/first", run, symlinks=True)
    record = json.loads((run / "run.json").read_text())
    record["attempts"][-1] |= {"state": "running", "ended": None}
    (run / "run.json").write_text(json.dumps(record))
    release = hold(run)
    try:
        assert "running" in automodel(home, "runs", "show", "gone").stdout.splitlines()[0]
        left_alone = automodel(home, "runs", "clean", "runs/gone", "--yes", "--last-checkpoint").stdout
        assert "goes on: left alone\nnothing to remove" in left_alone
    finally:
        release()
    shown = automodel(home, "runs", "show", "gone").stdout
    assert "failed" in shown.splitlines()[0] and "ended without a word" in shown
    shutil.rmtree(run)


def test_show_says_how_a_failed_run_ended_and_the_command_that_repeats_it(home: Path) -> None:
    shown = automodel(home, "runs", "show", "broken").stdout
    assert "why         " in shown and "automodel finetune llm -c tiny.yaml train.max_steps=6" in shown


def test_diff_names_what_differs_and_the_step_at_which_losses_part(home: Path) -> None:
    """The learning rate changed after step 2: the loss of step 3 is measured before it acts, that of step 4 after."""
    found = automodel(home, "runs", "diff", "first", "second").stdout
    rate = next(line for line in found.splitlines() if "optimizer.lr" in line)
    assert "0.001" in rate and "tiny.yaml:" in rate and "0.5  command line" in rate
    assert "data.seq_len" not in found and "torch" not in found and "dataset" not in found
    loss = next(line for line in found.splitlines() if line.startswith("loss"))
    assert loss.startswith("loss       parts at step 4 ")
    same = automodel(home, "runs", "diff", "first", "first").stdout
    assert "nothing differs" in same and "the same number at all 6 steps" in same


def test_tail_shows_the_newest_rows(home: Path) -> None:
    lines = automodel(home, "runs", "tail", "first", "-n", "2").stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 6/6  loss ") and "val_loss" in lines[1]


def test_clean_says_first_and_removes_only_what_is_neither_newest_nor_best(home: Path) -> None:
    run = home / "runs/clear"
    shutil.copytree(home / "runs/first", run, symlinks=True)
    (run / "checkpoints/step-000003.tmp-1-2").mkdir()
    for name in ("step-000002", "step-000006"):
        (run / "exports" / name).mkdir(parents=True)
    said = automodel(home, "runs", "clean", "clear").stdout
    assert "step-000002 " in said and "tmp-1-2" in said and "--yes removes it" in said
    assert len(list((run / "checkpoints").glob("step-*"))) == 4, "nothing is removed without --yes"
    assert automodel(home, "runs", "clean", "clear", "--yes").returncode == 0
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000006"]
    assert [path.name for path in (run / "exports").iterdir()] == ["step-000002"], "nothing could write it again"
    assert "nothing to remove" in automodel(home, "runs", "clean", "clear", "--yes").stdout
    automodel(home, "runs", "clean", "clear", "--yes", "--last-checkpoint")
    assert not list((run / "checkpoints").iterdir()) and (run / "export/model.safetensors").exists()
    shutil.rmtree(run)


def test_a_name_that_is_no_run_is_answered(home: Path) -> None:
    for arguments in (("show", "frist"), ("clean", "frist"), ("diff", "first", "frist")):
        refused = automodel(home, "runs", *arguments)
        assert refused.returncode == 2
        assert_error(refused.stderr, "run_not_found", values=("frist",))


def test_report_of_several_runs_says_what_differs_and_that_of_one_is_in_its_folder(home: Path) -> None:
    written = automodel(home, "report", "first", "second", "broken", "--out", "all.html")
    assert written.stdout == "all.html\n", written.stderr
    page = (home / "all.html").read_text()
    assert "<td>optimizer.lr</td><td>0.001</td><td>0.5</td><td>1e+30</td>" in page
    own = home / "runs/first/report.html"
    at_its_end = own.read_text()
    assert "<dd>finished</dd>" in at_its_end and "automodel finetune llm -c tiny.yaml" in at_its_end
    assert "400 documents by tokens" in at_its_end and "<th>before</th><th>after</th>" in at_its_end
    own.unlink()
    assert automodel(home, "report", "first").stdout == "runs/first/report.html\n"
    assert own.read_text() == at_its_end


def test_no_torch_is_imported(home: Path) -> None:
    shown = (("ls",), ("show", "first"), ("diff", "first", "second"), ("clean",))
    for words in (*(("runs", *arguments) for arguments in shown), ("report", "first", "second", "--out", "x.html")):
        command = [sys.executable, "-c", PROBE, "torch,transformers,hydra", *words]
        done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
