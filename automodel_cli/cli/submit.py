"""`submit -c CONF --nodes N --gpus-per-node G`: check a run and hand it to Slurm, or print files for Kubernetes or
SkyPilot. Imports no torch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from automodel_cli.cli import common
from automodel_cli.cli.cluster_options import cluster_options
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.trust import Trust
from automodel_cli.launch import kubernetes_skypilot, slurm, slurm_script
from automodel_cli.launch.local_launcher import safe_path
from automodel_cli.launch.slurm_queue import why_never
from automodel_cli.launch.slurm_servers import RolloutNodes

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.run.config_root import ConfigRoot

_SHARED = ("nodes", "ranks_per_node", "gpus_per_node", "image", "cpus_per_task", "notice", "max_requeues", "setup")
"""Options that mean the same to every scheduler."""
_CPUS_PER_GPU = 4
"""CPUs per rank. Slurm's default of one is too few for a rank that also reads data and drives NCCL."""


@click.command()
@click.option(
    "--to",
    default="slurm",
    show_default=True,
    type=click.Choice(["slurm", "k8s", "skypilot"]),
    help="Cluster type. k8s and skypilot need --dry-run, which prints the file.",
)
@click.option("--volume", metavar="NAME:/PATH", help="k8s, skypilot: storage that all nodes share.")
@click.option("--gpu-type", metavar="TYPE", help="skypilot: GPU type, for example H100 or A100-80GB.")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="k8s, skypilot: environment variable of the ranks. Repeatable.",
)
@click.option(
    "--secret",
    multiple=True,
    metavar="NAME[=SECRET:KEY]",
    help="k8s, skypilot: variable whose value stays out of the file (HF_TOKEN=hub:token). Repeatable.",
)
@click.option(
    "--rdma", metavar="RESOURCE=N", help="k8s: network devices of a pod, for example rdma/ib=8. Adds IPC_LOCK."
)
@cluster_options(required=True)
@click.option(
    "--rollout-nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Additional nodes for the servers of rollout.engine.servers.",
)
@click.option(
    "--rollout-gpus-per-node",
    type=click.IntRange(min=0),
    metavar="G",
    help="GPUs of each rollout node.  [default: --gpus-per-node]",
)
@click.option("--rollout-image", metavar="IMAGE", help="Container image of the servers.  [default: --image]")
@click.option("--job-name", metavar="NAME", help="Name of the job.  [default: name of the run]")
@click.option("--dry-run", is_flag=True, help="Print the batch script. Write and submit nothing.")
@common.config_options
def submit(
    conf: str,
    overrides: tuple[str, ...],
    trust: Trust,
    dry_run: bool,
    to: str,
    volume: str | None,
    gpu_type: str | None,
    env: tuple[str, ...],
    secret: tuple[str, ...],
    rdma: str | None,
    rollout_nodes: int | None,
    rollout_gpus_per_node: int | None,
    rollout_image: str | None,
    **options: Any,
) -> None:
    """Check a config and run it on a cluster, one rank per GPU.

    On Slurm, the run folder contains the batch script and the logs of every rank. Before the time limit, the ranks save
    a checkpoint and the job is requeued. The run then continues from that checkpoint. The run folder and this Python
    must be on a file system that all nodes share.

    With --rollout-nodes, the job has two components: --nodes for training, and more nodes for generation with vLLM or
    SGLang.
    """
    from automodel_cli.run.run_directory import run_directory

    job_name = options.pop("job_name")
    composed, recipe = common.load(conf, overrides, trust)
    if to == "slurm":  # a job may wait long before it fails; other clusters have other files
        common.refuse(composed, recipe.data_problems())
    options = fitted(composed, recipe, options)
    requested = {"--volume": volume, "--gpu-type": gpu_type, "--env": env, "--secret": secret, "--rdma": rdma}
    _refuse_foreign(to, dry_run, options, requested)
    given = {"--rollout-gpus-per-node": rollout_gpus_per_node, "--rollout-image": rollout_image}
    rollout = _rollout_nodes(recipe, options, to, rollout_nodes, given)
    if to != "slurm":
        shared = {name: options[name] for name in _SHARED}
        cloud = kubernetes_skypilot.CloudJob(
            name=job_name or recipe.run_name or composed.name,
            config=composed.to_yaml(),
            volume=volume,
            gpu_type=gpu_type,
            env=env,
            secrets=secret,
            rdma=rdma,
            trust=tuple(trust.arguments()),
            **shared,
        )
        click.echo(cloud.k8s() if to == "k8s" else cloud.skypilot(), nl=False)
        return
    folder = run_directory(recipe, composed, make=False)
    job = replace(job_of(composed, conf, overrides, folder, options), name=job_name or folder.name, rollout=rollout)
    if dry_run:
        click.echo(replace(job, has_folder=folder.exists()).script(), nl=False)
        return
    sbatch = slurm.find_sbatch()
    is_new = not folder.exists()
    folder = run_directory(recipe, composed, make=True)  # another one, if somebody was quicker
    _send(sbatch, replace(job, run_dir=folder, name=job_name or folder.name), remove=is_new)


def job_of(
    composed: Composed, conf: str, overrides: tuple[str, ...], folder: Path, options: Mapping[str, Any]
) -> slurm.Job:
    """Build the job of one run in `folder`. `options` are those of `cluster_options` after validation."""
    return slurm.Job(
        name=folder.name,
        run_dir=folder,
        conf=conf,
        overrides=overrides,
        trust=composed.trust,
        chdir=Path.cwd(),
        python=(sys.executable, *safe_path()),
        **options,
    )


def fitted(composed: Composed, recipe: ConfigRoot, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `cluster_options` with defaults for this run. Raises ConfigError if its ranks do not fit."""
    ranks_per_node = _ranks_per_node(options["gpus_per_node"], options["ranks_per_node"])
    _check_ranks(composed, recipe, options["nodes"], ranks_per_node)
    cpus = options["cpus_per_task"] or (_CPUS_PER_GPU if options["gpus_per_node"] else None)
    return {**options, "ranks_per_node": ranks_per_node, "cpus_per_task": cpus}


def _rollout_nodes(
    recipe: ConfigRoot, options: Mapping[str, Any], to: str, nodes: int | None, given: Mapping[str, Any]
) -> RolloutNodes | None:
    """Return the nodes for generation. Raises ConfigError if servers and nodes do not match."""
    servers = recipe.generation_servers()
    has_own = servers is not None and not servers.colocated
    if nodes is None:
        if has_own:
            assert servers is not None
            number = -(-servers.own_gpus // (options["gpus_per_node"] or 8)) or 1
            elsewhere = "rollout.engine.servers=null rollout.engine.url=http://localhost:8000"
            raise ConfigError(
                "rollout.placement=disaggregated needs additional GPUs for rollout.engine.servers, because each GPU of "
                "--gpus-per-node has a rank" + ("" if to == "slurm" else f". --to {to} starts no servers"),
                code="requires_setting",
                keys=("rollout.engine.servers", "rollout.placement"),
                fix=f"--rollout-nodes {number}" if to == "slurm" else elsewhere,
            )
        if (option := next((name for name, value in given.items() if value is not None), None)) is not None:
            message = f"{option} requires --rollout-nodes"
            raise ConfigError(
                message, code="requires_setting", keys=(option, "--rollout-nodes"), fix=f"remove {option}"
            )
        return None
    if to != "slurm":
        raise ConfigError(
            f"--rollout-nodes is not supported with --to {to}. Start the servers yourself and set rollout.engine.url",
            code="unsupported_combination",
            keys=("--rollout-nodes", "--to", "rollout.engine.url"),
            fix="remove --rollout-nodes, and set rollout.engine.servers=null rollout.engine.url=http://localhost:8000",
        )
    if servers is None or not has_own:
        raise ConfigError(
            f"--rollout-nodes {nodes} has no effect because this run starts no separate generation servers",
            code="no_effect",
            keys=("rollout.engine.servers", "rollout.placement"),
            fix=f"rollout=vllm rollout.placement=disaggregated rollout.engine.servers='{{num_servers: {nodes}}}' "
            "rollout.engine.transport=files, or remove --rollout-nodes",
        )
    gpus = given["--rollout-gpus-per-node"]
    gpus = options["gpus_per_node"] if gpus is None else gpus
    cpus = _CPUS_PER_GPU * servers.gpus or None
    return RolloutNodes(servers, nodes, gpus, cpus, given["--rollout-image"] or options["image"])


def _refuse_foreign(to: str, dry_run: bool, options: Mapping[str, object], cloud: Mapping[str, object]) -> None:
    """Report an option that the selected scheduler does not support."""
    if to == "slurm":
        if (given := next((name for name, value in cloud.items() if value), None)) is not None:
            message, fix = f"{given} requires --to k8s or skypilot", f"--to k8s --dry-run, or remove {given}"
            raise ConfigError(message, code="requires_setting", keys=(given, "--to"), fix=fix)
        return
    for name in ("partition", "account", "time", "options"):
        if options[name]:
            option = "--sbatch" if name == "options" else f"--{name}"
            message, keys = f"{option} is not supported with --to {to}", (option, "--to")
            raise ConfigError(message, code="unsupported_combination", keys=keys, fix=f"remove {option}")
    if not dry_run:
        hand = "| kubectl apply -f -" if to == "k8s" else "> task.yaml; sky jobs launch task.yaml"
        message = f"--to {to} requires --dry-run, because it prints a file and does not submit it"
        raise ConfigError(
            message, code="requires_setting", keys=("--to", "--dry-run"), fix=f"--dry-run   (then {hand})"
        )


def _send(sbatch: str, job: slurm.Job, *, remove: bool) -> None:
    folder = job.run_dir
    (folder / "logs").mkdir(exist_ok=True)  # Slurm would not make it, and the job would end without a word
    script = folder / slurm_script.SCRIPT
    script.write_text(job.script())
    try:
        number = slurm.send(sbatch, script)
    except RunError:
        if remove:
            shutil.rmtree(folder)
        raise
    for label, text in (
        ("submitted", f"job {number}: {job.size}"),
        ("script", script),
        ("logs", f"tail -f {folder}/logs/rank-0.log   (of every rank: {folder}/logs/rank-N.log)"),
        ("state", f"squeue -j {number}"),
        ("cancel", f"{job.cancel(number)}   (saves first)"),
    ):
        click.echo(f"{click.style(label.ljust(9), bold=True)}  {text}")
    warn_of_a_job_that_waits_forever(number)


def warn_of_a_job_that_waits_forever(number: str) -> None:
    """Print why Slurm will not start the job that it has accepted, if so."""
    if (reason := why_never(number)) is not None:
        label = click.style("warning".ljust(9), fg="yellow", bold=True)
        click.echo(f"{label}  the job cannot start: {reason}", err=True)
        click.echo(f"{' ' * 9}  scancel {number}, then other --time, --nodes or --partition", err=True)


def _ranks_per_node(num_gpus: int, num_ranks: int | None) -> int:
    if num_gpus and num_ranks not in (None, num_gpus):
        raise ConfigError(
            f"--ranks-per-node {num_ranks} must equal --gpus-per-node {num_gpus}: each GPU has one rank",
            code="mesh_size",
            keys=("--ranks-per-node", "--gpus-per-node"),
            fix=f"--gpus-per-node {num_gpus} without --ranks-per-node",
        )
    return num_gpus or num_ranks or 1


def _check_ranks(composed: Composed, recipe: ConfigRoot, nodes: int, ranks_per_node: int) -> None:
    """Compare the mesh with the ranks of all nodes. The error names the options, and the keys with their origins."""
    try:
        recipe.check_ranks(nodes * ranks_per_node)
    except ConfigError as error:
        paths = [f"{section}.{key}" for key in error.keys for section in composed.tree]
        known = {path: composed.origin(path) for path in (*error.keys, *paths)}
        keys = [f"{path} ({origin})" for path, origin in known.items() if origin != "default"]
        requested = f"--nodes {nodes} x {ranks_per_node} rank(s) a node"
        origin = "; ".join([*keys, requested])
        raise ConfigError(error.message, code=error.code, keys=error.keys, origin=origin, fix=error.fix) from error
