"""Two nodes of a real Slurm: a job that is told to leave saves, is requeued, and ends like one that was left alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_cli.models.tokenizer import ByteTokenizer
from tests import slurm_cluster
from tests.e2e.command import automodel, curve, metrics, write_config
from tests.errors import assert_error
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=str(slurm_cluster.missing()))]
_SIZE = ["--nodes", "2", "--gpus-per-node", "0"]
_STEPS = 30
_RUN = (f"train.max_steps={_STEPS}", "checkpoint.every=6", "logging.report=false")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with slurm_cluster.cluster() as variables, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    write_config(folder)
    return folder


def submit(folder: Path, name: str, *overrides: str) -> str:
    done = automodel(folder, "submit", "-c", "tiny.yaml", *_SIZE, f"run_name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"runs/{name}/job.sbatch" in done.stdout and "scancel" in done.stdout
    return re.search(r"job (\d+): 2 nodes x 1 rank\n", done.stdout)[1]  # type: ignore[index]


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def field(job: str, name: str) -> str:
    return re.search(rf"\b{name}=(\S+)", slurm("scontrol", "show", "job", job))[1]  # type: ignore[index]


def log(run: Path) -> str:
    path = run / "logs" / "rank-0.log"
    return path.read_text() if path.exists() else "(no log)"


def wait(run: Path, what: str, ready: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{slurm('squeue')}{log(run)}"
        time.sleep(0.05)


def step(run: Path) -> int:
    return max((row["step"] for row in metrics(run)), default=0) if (run / "metrics.jsonl").exists() else 0


def ended(job: str) -> bool:
    return field(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def wait_for_end(run: Path, job: str) -> str:
    wait(run, f"end of job {job}", lambda: ended(job))
    return field(job, "JobState")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The run of two ranks on this host, without Slurm, that nobody disturbed."""
    done = automodel(folder, "tiny.yaml", "mesh.dp_size=2", "run_name=whole", *_RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "whole"


def assert_same_bits(run: Path, whole: Path) -> None:
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, _STEPS + 1))
    for key in ("loss", "grad_norm", "lr", "num_label_tokens", "val_loss"):
        assert curve(run, key) == curve(whole, key)
    weights = [(folder / "export" / "model.safetensors").read_bytes() for folder in (run, whole)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_preempted_job_is_requeued_and_goes_on_bitwise(folder: Path, whole: Path) -> None:
    run = folder / "runs" / "preempted"
    site = ("--sbatch=--export=NONE", "--setup", 'SITE="$NOT_SET" && export SITE OMP_NUM_THREADS=1')
    site += ("--setup", f"export AUTOMODEL_CACHE={folder}/cache HF_HUB_OFFLINE=1")
    job = submit(folder, "preempted", *site, *_RUN)
    wait(run, "step 3", lambda: step(run) >= 3)
    slurm("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1 does before the time limit
    wait(run, "requeue", lambda: field(job, "Restarts") == "1" and field(job, "Reason") == "BeginTime")
    saved = step(run)
    assert saved < _STEPS and (run / "checkpoints" / f"step-{saved:06d}").is_dir(), log(run)
    # A requeued job waits two minutes. Not quite now: no node starts a job in the second in which it ended it.
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    assert wait_for_end(run, job) == "COMPLETED", log(run)

    text = log(run)
    assert "requeued 0 of at most 20 times" in text and "requeued 1 of at most 20 times" in text
    assert f"from step {saved}" in text and text.rstrip().endswith("done")
    assert (run / "logs" / "rank-1.log").exists() and not list((folder / "runs").glob("preempted-*"))
    assert (run / "logs" / f"job-{job}-0" / "rank-0.exit").read_text() == "75"
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_a_lost_rank_and_a_cancelled_job_cost_no_more_than_they_must(folder: Path, whole: Path) -> None:
    """The script that --dry-run prints; one rank killed, handed in again, cancelled, handed in again."""
    run = folder / "runs" / "lost"
    shown = automodel(folder, "submit", "-c", "tiny.yaml", *_SIZE, "--dry-run", "run_name=lost", *_RUN)
    (folder / "copy.sbatch").write_text(shown.stdout)
    assert not run.exists(), "a dry run writes nothing"
    job = slurm("sbatch", "--parsable", f"--chdir={folder}", str(folder / "copy.sbatch")).strip()
    wait(run, "step 8", lambda: step(run) >= 8)
    os.kill(int((run / "logs" / f"job-{job}-0" / "rank-1.pid").read_text()), signal.SIGKILL)
    assert wait_for_end(run, job) == "FAILED", log(run)
    text = log(run)
    assert field(job, "ExitCode") == "1:0" and field(job, "Restarts") == "0"
    assert "rank 0 of 2 on n1 lost another rank" in text and "Traceback" not in text
    assert "failed with exit code 1; the first rank (task) to end: n2: task 1: Killed" in text
    assert "nothing is lost but the steps since runs/lost/checkpoints/step-000006" in text
    assert text.rstrip().endswith("go on with: sbatch runs/lost/job.sbatch")

    job = slurm("sbatch", "--parsable", str(run / "job.sbatch")).strip()
    wait(run, "a further step", lambda: f"job {job}" in log(run) and "from step 6" in log(run) and step(run) >= 8)
    slurm("scontrol", "requeue", job)  # as Slurm does after a preemption
    wait(run, "the requeued job", lambda: field(job, "Restarts") == "1" and "Slurm has requeued this job" in log(run))
    assert "go on with" not in log(run).rpartition("Slurm ends this job")[2]
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    again = "attempt 2 (requeued 1 of at most 20 times)"
    wait(run, "a further step", lambda: again in log(run) and "\nstep " in log(run).rpartition(again)[2])
    slurm("scancel", job)
    assert wait_for_end(run, job) == "CANCELLED", log(run)
    wait(run, "the batch script", lambda: slurm_cluster.idle_nodes() == 2)
    saved = step(run)
    assert (run / "checkpoints" / f"step-{saved:06d}").is_dir() and saved < _STEPS, log(run)
    assert "stopped, and saved; go on with" in log(run)

    job = slurm("sbatch", "--parsable", str(run / "job.sbatch")).strip()
    assert wait_for_end(run, job) == "COMPLETED", log(run)
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_what_slurm_refuses_leaves_nothing_behind(folder: Path) -> None:
    done = automodel(folder, "submit", "-c", "tiny.yaml", *_SIZE, "--partition", "nowhere", "run_name=refused")
    assert done.returncode == 1
    assert_error(done.stderr, "submission_failed", values=("partition",))
    assert not (folder / "runs" / "refused").exists()


def test_a_job_that_can_never_start_is_reported(folder: Path) -> None:
    slurm("scontrol", "update", "PartitionName=debug", "MaxTime=0:30:00")
    try:
        done = automodel(folder, "submit", "-c", "tiny.yaml", *_SIZE, "--time", "1:00:00", "run_name=never")
    finally:
        slurm("scontrol", "update", "PartitionName=debug", "MaxTime=INFINITE")
    job = re.search(r"job (\d+): ", done.stdout)[1]  # type: ignore[index]
    slurm("scancel", job)
    found = re.search(r"cannot start: Partition(TimeLimit|Config) \(partition debug: MaxTime=00:30:00", done.stderr)
    assert done.returncode == 0 and found, done.stderr
    assert f"scancel {job}" in done.stderr


@pytest.mark.slow
def test_the_nodes_of_an_allocation_are_examined(folder: Path) -> None:
    command = ["salloc", "--nodes=2", "--quiet", sys.executable, "-m", "automodel_cli", "doctor", "--nodes"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ok +ranks +2 on 2 hosts: \S+, \S+ \(gloo\)", done.stdout), done.stdout + done.stderr
    assert re.search(r"bandwidth +\d+\.\d+ GB/s", done.stdout) and f"{folder} is shared by all ranks" in done.stdout


@pytest.mark.slow
def test_a_sweep_is_a_job_array_that_goes_on_with_what_is_left(folder: Path) -> None:
    """Two runs, one node each: the second is removed and comes again alone, to the same bits."""
    words = ("sweep", "-c", "tiny.yaml", "train.max_steps=4", "seed=0,1", "data.generator.num_validation=2", "--slurm")
    size = ("--nodes", "1", "--gpus-per-node", "0")

    def array(count: int) -> str:
        done = automodel(folder, *words, *size)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.search(rf"job array (\d+): {count} run", done.stdout)[1]  # type: ignore[index]

    runs = [folder / "runs/sweep-tiny" / name for name in ("000-seed=0", "001-seed=1")]
    job = array(2)
    wait(runs[1], "end of the array", lambda: not slurm("squeue", "-h", "-j", job).strip())
    assert [(run / "export/model.safetensors").exists() for run in runs] == [True, True], log(runs[0]) + log(runs[1])
    weights = (runs[1] / "export/model.safetensors").read_bytes()
    shutil.rmtree(runs[1])
    again = array(1)
    wait(runs[1], "end of the array", lambda: not slurm("squeue", "-h", "-j", again).strip())
    assert (runs[1] / "export/model.safetensors").read_bytes() == weights, log(runs[1])
    assert "all runs have finished" in automodel(folder, *words, *size).stdout


GENERATES = """
defaults: [grpo, {{data: chat_tasks}}, {{override rewards: none}}, {{override rollout: vllm}}, _self_]
model: {{pretrained: model}}
data: {{seq_len: 96}}
rollout:
  prompts_per_step: 4
  group_size: 4
  max_new_tokens: 16
  log_samples_every: null
  engine:
    {{transport: files, timeout: 60, retries: 1, servers: {{gpus_per_server: 0, port: {port}, executable: {program}}}}}
rewards:
  digits: {{_target_: automodel_cli.rollout.rewards.text.FormatRegex, pattern: ".*[0-9].*", timeout: null}}
parallelizer:
  mp_policy: {{_target_: automodel_cli.distributed.config.MixedPrecision, param_dtype: float32}}
train: {{global_batch_size: 16, microbatch_size: 1, max_steps: 200, epochs: null, num_cpu_threads: 1}}
logging: {{report: false}}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_job_trains_on_one_node_and_generates_on_another(folder: Path) -> None:
    """Told to end it saves; handed in again it goes on, with servers that begin with the weights of the model."""
    tokenizer = ByteTokenizer().build()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    program = json.dumps([sys.executable, str(Path(__file__).parents[1] / "vllm_stand_in.py")])
    (folder / "both.yaml").write_text(GENERATES.format(port=free_port(), program=program))
    size = ("--nodes", "1", "--gpus-per-node", "0", "--rollout-nodes", "1")
    done = automodel(folder, "submit", "-c", "both.yaml", *size, "--trust", "command")
    assert done.returncode == 0, done.stdout + done.stderr
    job = re.search(r"job (\d+): 1 node x 1 rank, and 1 node that generates", done.stdout)[1]  # type: ignore[index]
    run = folder / "runs" / "both"
    wait(run, "step 2", lambda: step(run) >= 2)
    told = json.loads((run / "logs" / "rollout_server-0.log").read_text().splitlines()[0])
    assert told["node"] == "n2" and "on n1" in log(run) and told["words"][:2] == ["serve", "model"]
    assert f"scancel --batch --signal=USR2 {job}" in done.stdout
    slurm("scancel", "--batch", "--signal=USR2", job)
    wait(run, "the end", lambda: not slurm("squeue", "-h", "-j", job).strip())
    saved = step(run)
    assert (run / "checkpoints" / f"step-{saved:06d}").is_dir() and "stopped, and saved; go on with" in log(run)

    script = (run / "job.sbatch").read_text()
    (run / "job.sbatch").write_text(script.replace('resume "$RUN"', f'resume "$RUN" train.max_steps={saved + 2}'))
    again = slurm("sbatch", "--parsable", str(run / "job.sbatch")).strip()
    wait(run, "the end", lambda: not slurm("squeue", "-h", "-j", again).strip())
    assert log(run).rstrip().endswith("done") and f"from step {saved}" in log(run)
    assert curve(run, "weight_version") == list(range(saved + 2))
    assert curve(run, "token_mult_prob_error") == pytest.approx([1.0] * (saved + 2), abs=1e-5)
