"""`doctor`: checks of this machine, with a command that fixes each problem. Imports torch only to examine kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import click

from automodel_cli.cli import common, tested_versions
from automodel_cli.cli.tested_versions import DISTRIBUTION
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import process_context
from automodel_cli.launch.local_launcher import safe_path

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_GIB = 2**30
_EXTRAS = {
    "peft": ("peft", "LoRA"),
    "gguf": ("gguf", "GGUF files"),
    "vlm": ("pillow", "pictures"),
    "te": ("transformer-engine", "FP8 and TE kernels"),
    "megatron": ("megatron-fsdp", "the Megatron-FSDP parallelizer"),
    "vllm": ("vllm", "fast rollouts"),
    "rewards": ("math-verify", "math rewards"),
    "tracking": ("wandb", "trackers"),
}


@dataclass(frozen=True)
class Diagnosis:
    """Print one line: subject, finding, and the command that fixes it."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    fix: str = ""


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--nodes", is_flag=True, help="Check the nodes of this allocation: network and shared folder.")
@common.trust_option
def doctor(run: str | None, nodes: bool, trust: Trust) -> int:
    """Check the installation, or the files of a run.

    Checks versions, conflicts, GPU, kernels, disk and optional packages. A release is tested, in range but untested, or
    outside the supported range. Exits with 1 if a check fails. With RUN, verifies every byte of its checkpoints. With
    --nodes, in a Slurm allocation or under torchrun, measures the network between nodes and checks that they share the
    folder.
    """
    if nodes:
        if run:
            message = f"--nodes and RUN={run} exclude each other"
            raise ConfigError(message, code="mutually_exclusive", keys=("--nodes",), fix="automodel doctor --nodes")
        if process_context.detect().kind == "local":
            return _on_every_node()
        verdicts = list(of_nodes())
        if process_context.detect().rank:
            return 0
    else:
        verdicts = list(of_run(run, trust)) if run else [verdict for check in CHECKS for verdict in check()]
    width = max(len(v.subject) for v in verdicts)
    for v in verdicts:
        label = click.style(f"{v.status:<4}", fg=_COLOURS[v.status], bold=True)
        click.echo(f"{label}  {v.subject:<{width}}  {v.text}")
        if v.fix:
            click.echo(f"      {'':<{width}}  {click.style('fix', fg='green')}  {v.fix}")
    return int(any(v.status == "fail" for v in verdicts))


def of_nodes() -> Iterator[Diagnosis]:
    """Run the measurements that need all ranks. Collective."""
    from automodel_cli.run.commands.cluster_check import examine_nodes

    for finding in examine_nodes(Path.cwd()):
        yield Diagnosis(*finding)


def _on_every_node() -> int:
    """One rank on each node of the allocation that this process is in."""
    srun = shutil.which("srun")
    if "SLURM_JOB_ID" not in os.environ or srun is None:
        raise ConfigError(
            "--nodes requires a Slurm allocation or torchrun",
            code="invalid_environment",
            keys=("--nodes",),
            fix="srun --nodes 2 --ntasks-per-node 1 automodel doctor --nodes",
        )
    each = [srun, "--ntasks-per-node=1", f"--ntasks={os.environ.get('SLURM_JOB_NUM_NODES', '1')}"]
    return subprocess.run([*each, sys.executable, *safe_path(), "-m", "automodel_cli", "doctor", "--nodes"]).returncode


def of_run(run: str, trust: Trust) -> Iterator[Diagnosis]:
    """Check the config and every file of a run. Code that the config names is not executed."""
    folder = common.run_folder(run, "checkpoint")
    from automodel_cli.run.commands.run_integrity import examine

    common.load(folder / "config.yaml", (), trust, run_dir=folder, untrusted=[])
    yield Diagnosis("ok", "config", str(folder / "config.yaml"))
    for finding in examine(folder):
        yield Diagnosis(*finding)


def python() -> Iterator[Diagnosis]:
    """The interpreter against the supported and the tested releases."""
    version, supported = ".".join(map(str, sys.version_info[:3])), tested_versions.ranges()["python"]
    verdict = tested_versions.verdict("python", version, supported)
    if verdict == "outside":  # pip does not install us here, but PYTHONPATH may
        yield Diagnosis("fail", "python", f"{version}  outside {supported}", "uv venv --python 3.12")
    else:
        yield Diagnosis("ok", "python", f"{version}  {verdict}  {sys.executable}")


def dependencies() -> Iterator[Diagnosis]:
    """Every base dependency against the supported and the tested releases."""
    ranges = tested_versions.ranges()
    for name in tested_versions.dependencies():
        yield _package(name, ranges[name], "fail")


def _package(name: str, supported: str, if_outside: Literal["warn", "fail"]) -> Diagnosis:
    version, fix = _version(name), f'pip install "{name}{supported}"'
    if version is None:
        return Diagnosis("fail", name, f"not installed, needs {supported}", fix)
    verdict = tested_versions.verdict(name, version, supported)
    if verdict == "outside":
        return Diagnosis(if_outside, name, f"{version}  outside {supported}", fix)
    return Diagnosis("ok", name, f"{version}  {verdict}")


def clashes() -> Iterator[Diagnosis]:
    """Other distributions that own our script name or a top-level package called `recipes`."""
    owners = sorted(
        d.name
        for d in metadata.distributions()
        for e in d.entry_points
        if e.name == "automodel" and d.name != DISTRIBUTION
    )
    if owners:
        text = f"{', '.join(owners)} also installs a script called automodel; the later install wins"
        yield Diagnosis("warn", "script", text, f"pip uninstall {owners[0]}   or use python -m automodel_cli")
    else:
        yield Diagnosis("ok", "script", shutil.which("automodel") or "not on PATH; python -m automodel_cli works")


def gpu() -> Iterator[Diagnosis]:
    """Driver and CUDA build of torch, without importing torch."""
    build = (_version("torch") or "").partition("+")[2]
    if not shutil.which("nvidia-smi"):
        if build.startswith("cu"):
            yield Diagnosis(
                "warn", "gpu", f"torch is built for {build}, but there is no NVIDIA driver: runs use the CPU"
            )
        else:
            yield Diagnosis("ok", "gpu", "none: runs use the CPU")
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    if answer.returncode:
        yield Diagnosis(
            "fail", "gpu", answer.stdout.strip() or answer.stderr.strip(), "nvidia-smi   (repair the driver)"
        )
        return
    gpus = answer.stdout.strip().splitlines()
    text = f"{len(gpus)} x {gpus[0]}" if gpus else "none visible to nvidia-smi"
    if gpus and build == "cpu":
        yield Diagnosis("fail", "gpu", f"{text}, but torch is a CPU build", "pip install --force-reinstall torch")
    else:
        yield Diagnosis("ok", "gpu", text)


def kernels() -> Iterator[Diagnosis]:
    """Kernels that run here, and the reason of each fallback. Imports torch."""
    try:
        from automodel_cli.run.commands.kernel_check import examine_kernels
    except ImportError as error:
        yield Diagnosis("fail", "kernels", f"not examined: {error}", f"pip install --force-reinstall {DISTRIBUTION}")
        return
    for finding in examine_kernels():
        yield Diagnosis(*finding)


def slurm() -> Iterator[Diagnosis]:
    """Whether this host submits to Slurm, and the job that this process is part of."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        size = f"{os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes, {os.environ.get('SLURM_NTASKS', '?')} tasks"
        yield Diagnosis("ok", "slurm", f"inside job {job}: {size}")
    elif sbatch := shutil.which("sbatch"):
        answer = subprocess.run(["sinfo", "--noheader", "--format=%D"], capture_output=True, text=True, timeout=20)
        if answer.returncode:
            reason = answer.stderr.strip().splitlines()[-1:]
            yield Diagnosis("warn", "slurm", f"{sbatch}, but no cluster answers: {''.join(reason)}", "scontrol ping")
        else:
            nodes = sum(int(n) for n in answer.stdout.split())
            yield Diagnosis("ok", "slurm", f"{sbatch}   {nodes} nodes: automodel submit")
    else:
        yield Diagnosis("ok", "slurm", "none: automodel submit --dry-run prints a script to copy")


def sandbox() -> Iterator[Diagnosis]:
    """Measure the isolation of code rewards on this machine."""
    command = [sys.executable, "-m", "automodel_cli.rollout.rewards.sandbox.host"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    text = answer.stdout.strip() or f"nothing: {answer.stderr.strip()[-200:]}"
    if "OPEN" in text or text.startswith("nothing"):
        fix = "a kernel with seccomp, and user namespaces or Landlock   (docs/guides/security.md)"
        yield Diagnosis("warn", "code sandbox", text, fix)
    else:
        yield Diagnosis("ok", "code sandbox", text)


def space() -> Iterator[Diagnosis]:
    """Check free space for runs and the Hugging Face cache, and shared memory for NCCL and data workers."""
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for subject, path, need, fix in (
        ("disk", Path.cwd(), 10, "output_dir=/a/larger/disk   (override of a run)"),
        ("hub cache", hub, 10, "export HF_HOME=/a/larger/disk"),
        ("shm", Path("/dev/shm"), 1, "docker run --shm-size=8g   (or --ipc=host)"),
    ):
        there = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(there).free / _GIB
        text = f"{free:.0f} GiB free" if free >= 10 else f"{free:.1f} GiB free"
        enough = free >= need
        yield Diagnosis("ok" if enough else "warn", subject, f"{text}  {path}", "" if enough else fix)


def extras() -> Iterator[Diagnosis]:
    """Optional packages: a line for each that is there, and how to get the rest."""
    ranges = tested_versions.ranges()
    optional = set(tested_versions.TESTED) - {"python", *tested_versions.dependencies()}
    for name in sorted({*optional, *(name for name, _ in _EXTRAS.values())}):
        if _version(name):
            yield _package(name, ranges.get(name, ""), "warn")
    missing = [f"{extra} ({purpose})" for extra, (name, purpose) in _EXTRAS.items() if not _version(name)]
    if missing:
        yield Diagnosis("ok", "extras not there", f"{', '.join(missing)}: pip install '{DISTRIBUTION}[NAME]'")


CHECKS: tuple[Callable[[], Iterator[Diagnosis]], ...] = (
    python,
    dependencies,
    clashes,
    gpu,
    kernels,
    slurm,
    sandbox,
    space,
    extras,
)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
