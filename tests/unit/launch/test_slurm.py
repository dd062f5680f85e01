"""The batch script, and what is refused before anything reaches Slurm. `tests/e2e/test_slurm.py` runs it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import peer_failure
from automodel_cli.launch.slurm import Job
from automodel_cli.launch.slurm_script import setup_block
from tests.errors import assert_error, raises
from tests.unit.cli.test_main import TRUST, automodel, check_quick

ROOT = Path(__file__).parents[3]
EXAMPLE = Job(
    name="my_run",
    run_dir=Path("runs/my_run"),
    nodes=2,
    gpus_per_node=8,
    ranks_per_node=8,
    cpus_per_task=8,
    time="24:00:00",
    conf="my_run.yaml",
    overrides=("train.epochs=2",),
    setup=("source .venv/bin/activate",),
)
"""What scripts/slurm/finetune.sbatch shows."""
TOY = "_target_: toy_recipe.nodes.Recipe\ndata: {path: x.jsonl}\noptimizer: {_target_: toy_recipe.nodes.Optimizer}\n"
SIZE = ["--nodes", "2", "--gpus-per-node", "0"]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


def test_the_script_to_copy_is_the_one_that_is_written() -> None:
    """After a change: python -m tests.unit.launch.test_slurm"""
    assert (ROOT / "scripts/slurm/finetune.sbatch").read_text() == EXAMPLE.script()


def test_the_script_is_bash_that_keeps_strange_words_whole(tmp_path: Path) -> None:
    odd = replace(
        EXAMPLE,
        run_dir=Path("runs/it's 100%"),
        overrides=("run_name='a b'", "x=$HOME"),
        trust=Trust(packages=("mine",)),
        image="a/b:c",
    )
    script = tmp_path / "x.sbatch"
    script.write_text(odd.script())
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = odd.script()
    assert "logs/rank-0.log'" in text and "100%%" in text, "Slurm would fill in a % itself"
    assert """check -c my_run.yaml 'run_name='"'"'a b'"'"'' 'x=$HOME' --resolved --trust-package mine""" in text
    assert text.count("srun ") - text.count("# srun ") >= 2 and "--container-image=a/b:c" in text


def test_site_options() -> None:
    job = replace(EXAMPLE, options=("--gres=gpu:a100:8", "--qos=high"), account="us", partition="big", chdir=Path("/w"))
    text = job.script()
    assert "#SBATCH --gres=gpu:a100:8\n#SBATCH --qos=high\n" in text and "--gpus-per-node" not in text
    assert all(f"#SBATCH --{o}\n" in text for o in ("account=us", "partition=big", "chdir=/w", "time=24:00:00"))
    cpus = replace(EXAMPLE, gpus_per_node=0, cpus_per_task=None).script()
    assert "gpus" not in cpus and "cpus-per-task" not in cpus


def test_a_notice_that_fits_is_what_the_error_offers() -> None:
    with pytest.raises(ConfigError) as refused:
        replace(EXAMPLE, time="5")
    assert refused.value.fix == "--notice 75" and replace(EXAMPLE, time="5", notice=75)
    assert replace(EXAMPLE, time="0"), "no limit"


def run_setup(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """The block of a script, in a shell with the script's own functions; `after` follows where it succeeds."""
    text = f'say() {{ echo "$*"; }}\n{setup_block(lines)}echo after\n'
    return subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True)


def test_a_setup_line_that_fails_ends_the_job_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "activate").write_text('[ -n "$NOT_SET" ] && echo never\nexport FOUND="$NOT_SET-1"\n')
    good = ("source ./activate", "if true; then", "  A=\"it's \\", '  fine"', "fi", "# a remark", 'test "$FOUND" = -1')
    done = run_setup(tmp_path, *good)
    assert (done.returncode, done.stdout, done.stderr) == (0, "after\n", "")
    done = run_setup(tmp_path, "true", "(exit 7)", "true")
    assert done.returncode == 2 and "exit code 7" in done.stdout and "--setup '(exit 7)'" in done.stdout
    assert "after" not in done.stdout
    assert "after" not in run_setup(tmp_path, "if true; then", "false", "fi").stdout


@pytest.mark.parametrize("time", ["30", "30:00", "1:30:00", "2-12", "2-12:30", "2-12:30:00"])
def test_time_limits(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in replace(EXAMPLE, time=time).script()


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"time": "soon"}, "--time soon"),
        ({"time": "2"}, ("--notice 300", "--time 2")),
        ({"time": "0:05:30"}, ("--notice 300", "--time 0:05:30")),
        ({"options": ("qos=high",)}, "--sbatch qos=high"),
        ({"setup": ("a\nb",)}, "--setup"),
        ({"name": "a\nb"}, "--job-name"),
        ({"run_dir": Path("runs/x\ntouch pwned\n")}, "output_dir or run_name"),
        ({"overrides": ("output_dir=x\ry",)}, "the override"),
        ({"partition": "a\x1bb"}, "--partition"),
        ({"image": "a\u2028b"}, "--image"),
        ({"chdir": Path("/a\nb")}, "the working directory"),
        ({"conf": "a\n.yaml"}, "-c"),
        ({"trust": Trust(packages=("a\nb",))}, "--trust"),
        ({"python": ("py\nthon",)}, "the path of Python"),
        ({"account": "a\vb"}, "--account"),
    ],
)
def test_values_that_a_script_cannot_contain(change: dict[str, object], values: str | tuple[str, ...]) -> None:
    code, values = ("invalid_value", (values,)) if isinstance(values, str) else ("out_of_range", values)
    with raises(ConfigError, code, values=values):
        replace(EXAMPLE, **change)  # type: ignore[arg-type]


def test_a_dry_run_prints_and_writes_nothing(toy: Path) -> None:
    found = automodel(toy, "submit", "-c", "toy.yaml", *TRUST, *SIZE, "--dry-run", "mesh.dp_size=2")
    assert found.returncode == 0 and found.stdout.startswith("#!/usr/bin/env bash\n# toy: 2 nodes x 1 rank.")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in found.stdout
    assert [path.name for path in toy.iterdir()] == ["toy.yaml"]


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        ([*SIZE, "mesh.dp_size=4"], "invalid_config", (4, "mesh.dp_size (command line); --nodes 2 x 1 rank")),
        ([*SIZE, "train.lr=1"], "unknown_key", ("train.lr",)),
        ([*SIZE, "mesh.dp_size=2", "--time", "soon"], "invalid_value", ("--time", "soon")),
        (["--nodes", "0", "--gpus-per-node", "1"], None, "0 is not in the range"),  # of click
        (
            ["--nodes", "2", "--gpus-per-node", "8", "--ranks-per-node", "2"],
            "mesh_size",
            ("--gpus-per-node 8", "--ranks-per-node 2"),
        ),
        ([*SIZE, "mesh.dp_size=2"], "submission_failed", ("sbatch",)),
    ],
)
def test_refused_before_anything_is_submitted(
    toy: Path, arguments: list[str], code: str | None, values: tuple[object, ...] | str
) -> None:
    found = automodel(toy, "submit", "-c", "toy.yaml", *TRUST, *arguments, PATH="/nonexistent")
    assert found.returncode == 2, found.stderr
    if code is None:
        assert values in found.stderr
    else:
        assert_error(found.stderr, code, values=values)
    assert [path.name for path in toy.iterdir()] == ["toy.yaml"]


def test_submit_is_quick_and_torch_free(toy: Path) -> None:
    heavy = "torch,rich,transformers"
    check_quick(toy, 0.4, f"{heavy},hydra", "submit", "--help")
    size = [*SIZE, "--dry-run", "mesh.dp_size=2"]
    check_quick(toy, 1.0, heavy, "submit", "-c", "toy.yaml", *TRUST, *size)


def test_submit_gives_sbatch_a_folder_that_is_ready(toy: Path) -> None:
    """A stand-in for sbatch: what it is given, and what is printed. The real one is in tests/e2e."""
    fake = toy / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\ntest -d runs/toy/logs && cp $2 seen.sbatch && echo '42;cluster'\n")
    fake.chmod(0o755)
    found = automodel(
        toy, "submit", "-c", "toy.yaml", *TRUST, *SIZE, "mesh.dp_size=2", PATH=f"{fake.parent}:/usr/bin:/bin"
    )
    assert found.returncode == 0, found.stderr
    assert "job 42: 2 nodes x 1 rank" in found.stdout and "scancel 42" in found.stdout
    assert (toy / "seen.sbatch").read_text() == (toy / "runs/toy/job.sbatch").read_text()
    assert "dp_size: 2  # command line" in (toy / "runs/toy/config.yaml").read_text()


def test_a_lost_peer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    gloo = (
        "[/x/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.7]:41677: Connection reset by peer. This is typically"
    )
    error = peer_failure.peer_failure_error(RuntimeError(gloo))
    assert isinstance(error, RunError) and error.exit_code == 1
    assert_error(error, "rank_failure", values=("rank 3 of 8", "gpu07"))
    assert "Read error [10.0.0.7]:41677: Connection reset by peer\n" in str(error)
    wrapped = RunError("checkpoint x could not be written")
    wrapped.__cause__ = RuntimeError(gloo)
    assert (
        peer_failure.peer_failure_error(wrapped) is not None
        and peer_failure.peer_failure_error(RunError("disk full")) is None
    )
    backend = type("DistBackendError", (RuntimeError,), {})
    assert peer_failure.peer_failure_error(
        backend("NCCL error: ncclRemoteError: A call failed possibly due to a network error")
    )
    assert (
        peer_failure.peer_failure_error(backend("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0")) is None
    )
    assert peer_failure.peer_failure_error(RuntimeError("Connection reset by peer")) is None, (
        "of whom? not of a collective"
    )


def test_nodes_that_generate_are_a_second_component(tmp_path: Path) -> None:
    four = ["submit", "-c", "grpo_qwen3_moe_30b_separate", "--nodes", "2", "--gpus-per-node", "8", "--dry-run"]
    done = automodel(tmp_path, *four, "--rollout-nodes", "2", "--time", "60")
    assert done.returncode == 0, done.stderr
    (tmp_path / "x.sbatch").write_text(done.stdout)
    subprocess.run(["bash", "-n", str(tmp_path / "x.sbatch")], check=True)
    trains, serves = done.stdout.split("#SBATCH hetjob\n")
    for component, tasks in ((trains, 8), (serves, 1)):
        for line in ("nodes=2", f"ntasks-per-node={tasks}", "gpus-per-node=8", "time=60"):
            assert f"#SBATCH --{line}\n" in component
    assert "#SBATCH --cpus-per-task=4\n" in trains and "#SBATCH --cpus-per-task=32\n" in serves
    assert "srun --het-group=0 " in serves and "srun --het-group=1 " in serves and "#SBATCH --signal" not in serves
    assert 'vllm serve Qwen/Qwen3-30B-A3B --host 0.0.0.0 --port "$PORT" ' in serves


@pytest.mark.parametrize(
    ("conf", "more", "code", "values"),
    [
        ("grpo_qwen3_moe_30b_separate", [], "requires_setting", ("rollout.engine.servers", "--rollout-nodes 2")),
        ("grpo_qwen3_moe_30b_separate", ["--rollout-nodes", "1"], "mesh_size", (8,)),
        (
            "grpo_qwen3_moe_30b_separate",
            ["--rollout-nodes", "2", "--to", "k8s"],
            "unsupported_combination",
            ("--rollout-nodes", "--to k8s", "rollout.engine.url"),
        ),
        ("grpo_qwen3_moe_30b_colocated", ["--rollout-nodes", "2"], "no_effect", ("--rollout-nodes 2",)),
        (
            "grpo_qwen3_moe_30b_colocated",
            ["--rollout-image", "x"],
            "requires_setting",
            ("--rollout-image", "--rollout-nodes"),
        ),
    ],
)
def test_servers_and_nodes_that_do_not_go_together_are_refused(
    tmp_path: Path, conf: str, more: list[str], code: str, values: tuple[object, ...]
) -> None:
    done = automodel(tmp_path, "submit", "-c", conf, "--nodes", "2", "--gpus-per-node", "8", "--dry-run", *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert_error(done.stderr, code, values=values)


if __name__ == "__main__":
    (ROOT / "scripts/slurm/finetune.sbatch").write_text(EXAMPLE.script())
