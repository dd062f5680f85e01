"""The table of docs/guides/fault_tolerance.md: what a run says when something around it breaks, and what is kept.

Faults of single parts are tested with those parts: checkpoints (unit/training), the data cache
(unit/data/test_prepare), killed ranks (unit/launch/test_local), servers (unit/rollout/servers/test_http_servers).
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.streaming.stream_source import StreamSource
from automodel_cli.launch import cleanup_timeout, rank_process
from automodel_cli.models.checkpoint_io.export import discard_staged, publish, staging
from automodel_cli.run import shared_directory
from automodel_cli.runs.lock import hold
from automodel_cli.runs.run_record import read_record
from tests import tiny
from tests.dist.harness import RankFailure, launch, launch_all
from tests.dist.sessions import session
from tests.e2e.command import TINY, automodel, curve, environment, metrics, start_cold, write_config

SFT = TINY.format(family="llama").replace("num_train: 400", "num_train: 40")
FEW = ("train.max_steps=4", "logging.report=false", "logging.console=plain", "checkpoint.every=null")
Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A small file system of its own: `mount("size=1m")`."""
    made: list[Path] = []

    def make(options: str) -> Path:
        folder = tmp_path / f"disk-{len(made)}"
        folder.mkdir()
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]).returncode:
            pytest.skip("this machine does not allow mounts")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _train(rank, world, folder, *overrides, then=None, run=None):
    """Train in this rank; `then(step, run_dir)` is called after every step. The error that ends it, as text."""
    try:
        with session(folder, SFT, *FEW, *overrides, run=run) as opened:
            for step, batches in opened.steps():
                opened.train(step, batches)
                if then is not None:
                    then(step, opened)
    except RunError as error:
        return str(error)
    return None


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    os.truncate(disk / "filler", (disk / "filler").stat().st_size // 4096 * 4096)


def _until_the_disk_is_full(rank, world, folder, disk):
    def then(step, opened):
        if step == 2:
            opened.save(step)
            _fill(disk)
            size = os.statvfs(disk).f_frsize
            opened.meter._file.write("\n" * size)  # to the end of the block that the file has already

    return _train(rank, world, folder, f"output_dir={disk}", "train.max_steps=400", then=then)


def test_a_disk_that_fills_up_under_the_metrics(tmp_path: Path, mount: Mount) -> None:
    disk = mount("size=80m")
    said = launch(_until_the_disk_is_full, 1, tmp_path, disk, process_group=False)
    assert "metrics.jsonl cannot be written: No space left on device" in said
    assert f"then automodel resume {disk / 'config'}" in said
    (disk / "filler").unlink()
    assert launch(_train, 1, tmp_path, f"output_dir={disk}", "checkpoint.resume=auto", process_group=False) is None
    assert [row["step"] for row in metrics(disk / "config") if "loss" in row] == [1, 2, 3, 4]


def _export_to(rank, world, folder, disk):
    from automodel_cli.run.finalize import finalize_run

    with session(folder, SFT, *FEW, "train.max_steps=1") as opened:
        for step, batches in opened.steps():
            opened.train(step, batches)
        (opened.run_dir / "export").symlink_to(disk / "export")
        try:
            finalize_run(opened)
        except RunError as error:
            return str(error)
    return None


def test_a_disk_that_is_too_small_for_the_export(tmp_path: Path, mount: Mount) -> None:
    disk = mount("size=100k")
    said = launch(_export_to, 1, tmp_path, disk, process_group=False)
    assert f"the export {disk / 'export'} could not be written: " in said and "No space left on device" in said
    assert "the checkpoint is complete" in said and not list(disk.iterdir()), "half an export is removed"
    assert (tmp_path / "runs/config/checkpoints/step-000001").is_dir()


def _whole_export(folder: Path, value: float) -> None:
    model = tiny.build_hf("llama")
    torch.nn.init.constant_(model.model.norm.weight, value)
    model.save_pretrained(folder)


def _exported(folder: Path) -> float:
    return AutoModelForCausalLM.from_pretrained(folder).model.norm.weight[0].item()


def test_a_kill_during_an_export_leaves_the_older_one(tmp_path: Path) -> None:
    """Killed while it writes, and in the middle of putting it in place: the older one, or none that would load."""
    folder = tmp_path / "export"
    for value in (1.0, 2.0):
        written = staging(folder)
        _whole_export(written, value)
        publish(written, folder)
        assert _exported(folder) == value and [p.name for p in tmp_path.iterdir()] == ["export"]
    (folder / "notes.txt").write_text("mine")
    _whole_export(staging(folder), 3.0)
    assert _exported(folder) == 2.0
    written = staging(folder)  # removes what was left
    _whole_export(written, 4.0)
    (written / "model.safetensors").chmod(0o600)
    real, Path.replace = Path.replace, lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            publish(written, folder)
    finally:
        Path.replace = real
    with pytest.raises((OSError, ValueError)):
        _exported(folder)
    written = staging(folder)
    _whole_export(written, 5.0)
    publish(written, folder)
    assert _exported(folder) == 5.0 and (folder / "notes.txt").read_text() == "mine"
    discard_staged(folder)


def test_a_read_only_run_folder(tmp_path: Path, mount: Mount) -> None:
    disk = mount("size=80m")
    assert launch(_train, 1, tmp_path, f"output_dir={disk}", process_group=False) is None
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for overrides, what in ((("checkpoint.resume=auto",), "written"), ((), "created")):
        said = launch(_train, 1, tmp_path, f"output_dir={disk}", *overrides, process_group=False)
        assert f"cannot be {what}: Read-only file system" in said and "output_dir=/a/writable/folder" in said
    assert len(metrics(disk / "config")) == 5


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    assert launch(_train, 1, tmp_path, "train.max_steps=1", process_group=False) is None
    run = tmp_path / "runs/config"
    config = (run / "config.yaml").read_text()
    release = hold(run)
    said = launch(_train, 1, tmp_path, "train.max_steps=2", "checkpoint.resume=auto", process_group=False)
    assert said.startswith(f"runs/config is in use: process {os.getpid()} on ") and "run_name=another-name" in said
    assert (run / "config.yaml").read_text() == config, "the running one keeps its config"
    release()
    more = ("train.max_steps=2", "checkpoint.resume=auto", "train.extend_schedule=stretch")
    assert launch(_train, 1, tmp_path, *more, process_group=False) is None


def _nan_on_rank_1(rank, world, folder):
    def then(step, opened):
        if step == 2 and rank == 1:
            parameter = next(opened.model.parts[0].parameters())
            parameter.data.to_local().fill_(float("nan"))

    return _train(rank, world, folder, "mesh.dp_size=2", then=then)


def test_a_rank_whose_numbers_are_not_finite(tmp_path: Path) -> None:
    """All ranks stop before the optimizer moves, and name the rows; rows 1 and 2 are written."""
    for said in launch_all(_nan_on_rank_1, 2, tmp_path, process_group=False):
        assert said.startswith("step 3: the loss is nan") and "ChatTasks/train:" in said, said
    assert [row["step"] for row in metrics(tmp_path / "runs/config")] == [1, 2]


def _train_in_a_folder_of_its_own(rank, world, folder):
    shared_directory.SECONDS_TO_SEE = 0.5
    os.environ["SLURMD_NODENAME"] = f"node{rank}"
    mine = folder / f"host-{rank}"
    mine.mkdir()
    try:
        return _train(rank, world, mine, "mesh.dp_size=2")
    except ConfigError as error:
        return str(error)


def test_hosts_that_do_not_see_one_run_folder_train_nothing(tmp_path: Path) -> None:
    """Both have a `config.yaml` at the same path, which proves nothing."""
    said = launch_all(_train_in_a_folder_of_its_own, 2, tmp_path, process_group=False)
    assert (
        said[0] == said[1] and f"{tmp_path}/host-0/runs/config on node0 is not the same folder on every host" in said[0]
    )
    assert "not seen on node1" in said[0] and "output_dir=" in said[0]
    assert not list(tmp_path.glob("host-*/runs/*")), "no folder of a run that never began"


def _raise_on_rank_1(rank, world, folder):
    def then(step, opened):
        if step == 2 and rank == 1:
            raise ValueError("a bug on one rank")

    return _train(rank, world, folder, "mesh.dp_size=2", then=then)


def test_a_rank_that_raises(tmp_path: Path) -> None:
    """Its traceback stands in its own log; the other one notices at its next collective."""
    with pytest.raises(RankFailure, match=r"Connection (closed|reset) by peer"):
        launch_all(_raise_on_rank_1, 2, tmp_path, process_group=False)
    assert "ValueError: a bug on one rank" in (tmp_path / "runs/config/logs/rank-1.log").read_text()


def _raise_where_destroying_is_collective(rank, world, folder):
    """As under NCCL, whose shutdown waits for every rank."""
    destroy, store = (
        dist.destroy_process_group,
        dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False),
    )

    def destroy_with_all(group=None):
        store.add("destroying", 1)
        while store.add("destroying", 0) < world:
            time.sleep(0.1)
        destroy(group)

    dist.destroy_process_group = destroy_with_all

    def then(step, opened):
        if step == 4 and rank == 1:
            raise ValueError("a bug on one rank")

    return _train(rank, world, folder, "mesh.dp_size=2", "validation.every=null", then=then)


def test_a_rank_that_raises_does_not_wait_for_the_others_to_leave(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"Connection (closed|reset) by peer"):
        launch_all(_raise_where_destroying_is_collective, 2, tmp_path, process_group=False, timeout=40)
    assert "ValueError: a bug on one rank" in (tmp_path / "runs/config/logs/rank-1.log").read_text()


def _hang_in_the_clean_up(rank, world, folder):
    cleanup_timeout.TELL_SECONDS = cleanup_timeout.LEAVE_SECONDS = 0.5
    rank_process._status = rank_process.make_status(folder / f"status-{rank}", None)

    def then(step, opened):
        opened.at_exit.callback(time.sleep, 60)
        raise ValueError(f"a bug on rank {rank}")

    return _train(rank, world, folder, then=then)


def test_a_clean_up_that_hangs_hides_no_reason_and_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match="ValueError: a bug on rank 0"):
        launch_all(_hang_in_the_clean_up, 1, tmp_path, process_group=False)
    assert time.monotonic() - began < 30 and (tmp_path / "status-0/rank-0.exit").read_text() == "1"
    (attempt,) = read_record(tmp_path / "runs/config")["attempts"]
    assert attempt["state"] == "failed" and "a bug on rank 0" in attempt["error"]


def _sleep_on_rank_1(rank, world, folder):
    def then(step, opened):
        if step == 3:
            opened.save(step)
            if rank == 1:
                time.sleep(60)

    return _train(rank, world, folder, "mesh.dp_size=2", "train.step_timeout_seconds=1", then=then)


def test_a_rank_that_hangs_is_named_with_what_the_others_wait_in(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        launch_all(_sleep_on_rank_1, 2, tmp_path, process_group=False)
    said, logs = str(failure.value), tmp_path / "runs/config/logs"
    assert time.monotonic() - began < 30
    assert re.search(
        r"RunError \[timeout\]: rank 1 \(process \d+ on \S+\) stands still: is in then \(e2e/test_faults.py:\d+\)", said
    )
    assert "last heard of in step 3, after a checkpoint" in said and "the other one waits in " in said
    assert re.search(r"\(gloo:\w+ of [\w ]+, group 0/default_pg\)", said), (
        "torch's flight recorder names the collective"
    )
    assert "resumes from step-000003" in said
    for rank, where in enumerate(("all_gather|all_reduce", "in then")):
        assert re.search(where, (logs / f"rank-{rank}.stacks").read_text()), f"the stack of rank {rank}"
    assert json.loads((logs / "rank-0.collectives.json").read_bytes())["entries"]


def _nap_on_rank_1(rank, world, folder):
    lines: list[str] = []

    def then(step, opened):
        opened.print = lines.append
        if rank == 1:
            time.sleep(0.15)

    assert _train(rank, world, folder, "mesh.dp_size=2", "train.max_steps=22", then=then) is None
    return lines


@pytest.mark.slow
def test_a_rank_that_is_always_slower_is_named_once(tmp_path: Path) -> None:
    lines, of_rank_1 = launch_all(_nap_on_rank_1, 2, tmp_path, process_group=False)
    (said,) = lines
    assert re.fullmatch(
        r"rank 1 on \S+ is slower than the others: \S+ s of its own a step, \S+ s the others .*", said
    ), said
    assert not of_rank_1
    rows = [row for row in metrics(tmp_path / "runs/config") if "loss" in row][2:]
    assert statistics.median(row["rank_busy_seconds_max"] - row["rank_busy_seconds_min"] for row in rows) > 0.07
    assert sum(row["slowest_rank"] == 1 for row in rows) > len(rows) / 2


def _read_slowly_on_rank_1(rank, world, folder):
    def slowly(self, name, shard):
        for row in read(self, name, shard):
            time.sleep(0.5)
            yield row

    read = StreamSource.rows_of
    if rank == 1:
        StreamSource.rows_of = slowly
    data = "data={generator: null, path: rows.jsonl, seq_len: 16, packing: none, streaming: {lanes: 2, block_rows: 2}}"
    return _train(rank, world, folder, "mesh.dp_size=2", "train.max_steps=2", data)


def test_a_slow_store_on_one_rank_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(40)))
    monkeypatch.chdir(tmp_path)
    assert launch_all(_read_slowly_on_rank_1, 2, tmp_path, process_group=False) == [None, None]
    rows = [row for row in metrics(tmp_path / "runs/config") if "loss" in row]
    # the first step waits for a block of two rows, whatever else the machine does
    assert rows[0]["data_wait_share"] * rows[0]["step_seconds"] > 0.9
    assert all(0 <= row["data_wait_share"] <= 1 for row in rows) and len(rows) == 2


@pytest.mark.slow
def test_a_frozen_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """SIGSTOP: nothing comes from it any more, no stack either; the launcher ends it with the others."""
    write_config(tmp_path)
    more = ("mesh.dp_size=2", "train.max_steps=4000", "data.num_workers=1", "train.step_timeout_seconds=3")
    process = start_cold(tmp_path, "tiny.yaml", *more)
    os.kill(frozen := _rank_1_of(process, tmp_path, rows=12), signal.SIGSTOP)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert f"RunError [timeout]: rank 1 (process {frozen} on " in output
    assert (
        "tells nothing any more (stopped, in C code, or its host cannot be reached)" in output
        and "the other one waits in " in output
    )
    assert "automodel resume runs/tiny   (resumes from step-000010)" in output
    assert not Path(f"/proc/{frozen}").exists()


@pytest.mark.slow
def test_ranks_are_started_again_after_a_kill_and_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    write_config(tmp_path)
    short = ("mesh.dp_size=2", "data.num_workers=1", "logging.report=false")
    process = start_cold(tmp_path, "tiny.yaml", *short, "train.max_restarts=2")
    os.kill(killed := _rank_1_of(process, tmp_path, rows=12), signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert f"rank 1 was killed: process {killed} by a person" in output
    assert "restart 1 of 2 (train.max_restarts): resumes from step-000010" in output and "restart 2" not in output
    done = automodel(tmp_path, "tiny.yaml", *short, "run_name=undisturbed")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [tmp_path / "runs" / name for name in ("tiny", "undisturbed")]
    for key in ("loss", "grad_norm", "val_loss"):
        assert curve(runs[0], key) == curve(runs[1], key)
    weights = [(run / "export/model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] and not (tmp_path / "runs/tiny-2").exists()


def _rank_1_of(process: subprocess.Popen[str], folder: Path, *, rows: int) -> int:
    """The process of rank 1, once `rows` steps are recorded."""
    written = folder / "runs/tiny/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (written.exists() and written.read_bytes().count(b"\n") >= rows):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return next(int(pid) for pid in children if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0"))


def test_a_damaged_checkpoint_through_the_command_line(tmp_path: Path) -> None:
    """`doctor RUN` names the file, `resume` goes back behind it aloud and trains the lost steps again."""
    write_config(tmp_path)
    done = automodel(tmp_path, "tiny.yaml", *FEW[1:3], "train.max_steps=4", "checkpoint.every=2")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/tiny"
    before = [row["loss"] for row in metrics(run) if "loss" in row]
    healthy = automodel(tmp_path, "doctor", "runs/tiny")
    assert healthy.returncode == 0 and healthy.stdout.count("checksums match") == 2, healthy.stdout
    shard = run / "checkpoints/step-000004/__0_0.distcp"
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))
    os.truncate(run / "export/model.safetensors", 1000)
    sick = automodel(tmp_path, "doctor", "tiny")
    assert sick.returncode == 1 and "__0_0.distcp " in sick.stdout and "XXH3-128" in sick.stdout
    assert "model.safetensors is cut short" in sick.stdout
    done = automodel(tmp_path, "resume", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step-000004 is damaged: __0_0.distcp " in done.stderr and "from step 2" in done.stdout
    assert [row["loss"] for row in metrics(run) if "loss" in row] == before


@pytest.mark.nightly
def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on_with_it(tmp_path: Path) -> None:
    write_config(tmp_path)
    process = start_cold(tmp_path, "tiny.yaml", "mesh.dp_size=2", "train.max_steps=30", "data.num_workers=1")
    os.kill(stopped := _rank_1_of(process, tmp_path, rows=2), signal.SIGSTOP)
    time.sleep(8)
    os.kill(stopped, signal.SIGCONT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert (
        f"rank 1 (process {stopped}) is stopped, and the other ranks wait for it; resume it with: kill -CONT" in output
    )
    assert len([row for row in metrics(tmp_path / "runs/tiny") if "loss" in row]) == 30


VANISH = """
import shutil
from automodel_cli.training.callback import Callback

class Vanish(Callback):
    def on_step(self, run, step, values):
        if step == 2:
            shutil.rmtree(run.run_dir)
"""


def test_a_run_folder_that_vanishes_is_made_again_with_all_that_can_be_had(tmp_path: Path) -> None:
    (tmp_path / "vanish.py").write_text(VANISH)
    words = ["train.max_steps=5", "checkpoint.every=4", "callbacks=[{_target_: vanish.Vanish}]", "logging.report=false"]
    done = automodel(tmp_path, str(write_config(tmp_path)), *words, "--trust-package", "vanish")
    run = tmp_path / "runs" / "tiny"
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was removed during the run; its config and metrics were written again") == 1
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 3, 4, 5]
    assert (run / "export" / "config.json").exists()
    (line,) = (line.strip() for line in done.stdout.splitlines() if "automodel resume" in line)
    again = automodel(tmp_path, *shlex.split(line.partition("    ")[0])[1:], "callbacks=[]")
    assert again.returncode == 0 and "step 10/10" in again.stdout, again.stderr
    rates = curve(run, "lr")
    assert len(rates) == 10 and rates[5:] == rates[:5], "the line that is printed restarts the schedule"


@pytest.mark.slow
def test_a_closed_terminal_saves_a_run_of_two_ranks(tmp_path: Path) -> None:
    """The launcher and rank 0 have the terminal; what they write after its end is in the run folder."""
    write_config(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        command = [sys.executable, "-m", "automodel_cli", "tiny.yaml", "mesh.dp_size=2", "train.max_steps=5000"]
        os.execve(command[0], command, environment(tmp_path))
    seen = b""
    while b"tok/s" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    run = tmp_path / "runs" / "tiny"
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert json.loads((run / "run.json").read_text())["attempts"][-1]["state"] == "interrupted"
    assert f"stopped after step {step}; continue with: automodel resume" in (run / "logs" / "rank-0.log").read_text()
    again = automodel(tmp_path, "resume", "tiny", f"train.max_steps={step + 2}")
    assert again.returncode == 0, again.stderr
    assert len(curve(run)) == step + 2


def test_a_run_that_is_refused_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    write_config(tmp_path)
    longer = ["train.max_steps=4", "lr_scheduler.warmup_steps=9"]
    refused = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", *longer)
    assert refused.returncode == 2 and not (tmp_path / "runs").exists()
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "train.max_steps=2", "checkpoint.save_final=true")
    assert done.returncode == 0
    kept = sorted(path.name for path in (tmp_path / "runs").rglob("*"))
    again = automodel(tmp_path, "resume", "tiny", *longer)  # an earlier run stays as it was
    assert again.returncode == 2 and sorted(path.name for path in (tmp_path / "runs").rglob("*")) == kept
