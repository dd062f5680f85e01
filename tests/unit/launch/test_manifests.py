"""Files for Kubernetes and SkyPilot: fields as their schemas know them, and commands that really start a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_cli.cli.main import run
from tests.e2e.command import environment, metrics, write_config

SIZE = ("--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "1", "--cpus-per-task", "2", "--dry-run")

# From the CRD of JobSet v1alpha2 and the API of batch/v1 and v1 (kubernetes-sigs/jobset, config/components/crd).
JOBSET = {
    "spec": {"network", "failurePolicy", "replicatedJobs", "successPolicy", "startupPolicy", "suspend"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJob": {"name", "groupName", "replicas", "template", "dependsOn"},
    "job": {"parallelism", "completions", "completionMode", "backoffLimit", "template"},
}
# From SkyPilot's YAML spec (docs.skypilot.co/en/latest/reference/yaml-spec.html).
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"}
RESOURCES = {"infra", "accelerators", "cpus", "memory", "image_id", "job_recovery", "use_spot", "disk_size"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_config(tmp_path, name="My_Run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(["submit", "-c", "My_Run.yaml", *SIZE, *arguments, "mesh.dp_size=2"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_a_jobset_has_the_fields_of_its_schema_and_pods_that_find_each_other(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = submit(capsys, "--to", "k8s", "--image", "me/automodel:1", "--volume", "runs:/work", "--notice", "120")
    config, jobset = yaml.safe_load_all(text)
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["kind"] == "JobSet"
    spec: dict[str, Any] = jobset["spec"]
    (job,) = spec["replicatedJobs"]
    inner = job["template"]["spec"]
    parts = {"spec": spec, "network": spec["network"], "failurePolicy": spec["failurePolicy"]}
    for name, part in {**parts, "replicatedJob": job, "job": inner}.items():
        assert set(part) <= JOBSET[name], name
    assert inner["parallelism"] == inner["completions"] == 2 and inner["backoffLimit"] == 0
    pod = inner["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": 2} and container["workingDir"] == "/work"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "--master-addr my-run-node-0-0.my-run --master-port" in container["command"][2]
    assert config["metadata"]["name"] == pod["volumes"][1]["configMap"]["name"]
    assert yaml.safe_load(config["data"]["My_Run.yaml"])["train"]["global_batch_size"] == 4
    assert not (folder / "runs").exists(), "a dry run makes nothing"


def test_what_is_missing_or_belongs_to_slurm_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in (
        (("--to", "k8s", "--volume", "a:/b"), "--to k8s needs an image"),
        (("--to", "k8s", "--image", "x"), "NAME:/PATH is expected"),
        (("--to", "skypilot", "--volume", "a:/b", "--partition", "gpu"), "--partition is Slurm's"),
        (("--volume", "a:/b"), "--volume is for --to k8s or skypilot"),
    ):
        assert run(["submit", "-c", "My_Run.yaml", *SIZE, *more, "mesh.dp_size=2"]) == 2
        assert said in capsys.readouterr().err
    without = [word for word in SIZE if word != "--dry-run"]
    assert run(["submit", "-c", "My_Run.yaml", *without, "--to", "k8s", "mesh.dp_size=2"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_skypilot_task_has_the_fields_of_its_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = yaml.safe_load(submit(capsys, "--to", "skypilot", "--volume", "runs:/work", "--image", "me/automodel:1"))
    assert set(task) <= SKYPILOT and set(task["resources"]) <= RESOURCES
    assert task["num_nodes"] == 2 and task["volumes"] == {"/work": "runs"} and task["name"] == "my-run"
    assert task["resources"]["image_id"] == "docker:me/automodel:1"


@pytest.mark.slow
def test_the_script_of_a_task_trains_on_two_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both nodes are this machine; the environment is what SkyPilot sets."""
    more = ("--to", "skypilot", "--volume", f"runs:{folder}", "train.max_steps=3", "logging.report=false")
    script = yaml.safe_load(submit(capsys, *more))["run"].replace("python -m", f"{sys.executable} -m")
    nodes = []
    for rank in range(2):
        env = environment(folder) | {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(rank)}
        home = folder / f"home-{rank}"
        home.mkdir()
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(["bash", "-c", script], env=env | {"HOME": str(home)}, cwd=os.sep, **pipe))
    output = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    assert [row["step"] for row in metrics(folder / "runs/My_Run") if "loss" in row] == [1, 2, 3]
    assert "2 ranks on cpu" in output[0]
