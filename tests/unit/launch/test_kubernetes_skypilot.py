"""Files for Kubernetes and SkyPilot: fields as their schemas know them, and commands that really start a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_cli.cli.main import run
from automodel_cli.config.composition.compose import compose
from tests.e2e.command import environment, metrics, write_config
from tests.errors import assert_error

SIZE = ("--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "1", "--cpus-per-task", "2", "--dry-run")

SCHEMAS = json.loads((Path(__file__).parents[2] / "vectors/manifests.json").read_bytes())
K8S = ("--to", "k8s", "--image", "me/automodel:1", "--volume", "runs:/work")
SKYPILOT = ("--to", "skypilot", "--volume", "runs:/work")
ODD = "it's 100% $odd"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_config(tmp_path, name="My_Run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(capsys: pytest.CaptureFixture[str], *arguments: str, conf: str = "My_Run.yaml") -> str:
    code = run(["submit", "-c", conf, *SIZE, *arguments, "mesh.dp_size=2"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def validate(value: Any, schema: str) -> None:
    pytest.importorskip("jsonschema").validate(value, SCHEMAS[schema])


def jobset_of(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The ConfigMap, the spec of the one Job and its pod, each valid."""
    config, jobset = yaml.safe_load_all(text)
    validate(config, "config_map")
    validate(jobset, "jobset")
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["kind"] == "JobSet"
    (job,) = jobset["spec"]["replicatedJobs"]
    inner = job["template"]["spec"]
    rule = {"name": "config", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 20, "rules": [rule]}
    return config, inner, inner["template"]["spec"]


def test_a_jobset_has_the_fields_of_its_schema_and_pods_that_find_each_other(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, job, pod = jobset_of(submit(capsys, *K8S, "--notice", "120"))
    assert job["parallelism"] == job["completions"] == 2 and job["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = {"containerName": container["name"], "operator": "In", "values": [2, 3]}
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    assert container["resources"]["limits"] == {"cpu": 2} and container["workingDir"] == "/work"
    assert "securityContext" not in container
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "--master-addr my-run-node-0-0.my-run --master-port" in container["command"][2]
    assert config["metadata"]["name"] == pod["volumes"][1]["configMap"]["name"]
    assert yaml.safe_load(config["data"]["My_Run.yaml"])["train"]["global_batch_size"] == 4
    assert not (folder / "runs").exists(), "a dry run makes nothing"


def test_variables_secrets_and_network_devices_of_a_pod(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--env", "NCCL_DEBUG=INFO", "--env", "X=a b=c", "--secret", "HF_TOKEN", "--secret", "W=keys:wandb")
    _, _, pod = jobset_of(submit(capsys, *K8S, *more, "--rdma", "rdma/ib=8", "--notice", "100"))
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": 2, "rdma/ib": 8}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    values = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert values["NCCL_DEBUG"] == "INFO" and values["X"] == "a b=c"
    assert values["HF_HOME"].startswith("/work/") and values["AUTOMODEL_CACHE"].startswith("/work/")
    secrets = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"] if "valueFrom" in e}
    wanted = {"HF_TOKEN": {"name": "hf-token", "key": "HF_TOKEN"}, "W": {"name": "keys", "key": "wandb"}}
    assert secrets == wanted
    task = yaml.safe_load(submit(capsys, *SKYPILOT, *more))
    validate(task, "skypilot_task")
    assert task["secrets"] == {"HF_TOKEN": None, "W": None} and task["envs"]["X"] == "a b=c"

    from torch.distributed.run import get_args_parser

    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = getattr(get_args_parser().parse_args(["script"]), "shutdown_timeout", 90)  # torch 2.11 has none
    assert found == 90, "the ranks have all of the notice but what torchrun needs itself"


def recorded(folder: Path, script: str, code_of_check: int = 0) -> tuple[int, list[list[str]]]:
    """The exit code of `script` in a shell whose python writes down what it is called with, and these calls."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\nwith open({str(calls)!r}, 'a') as file:\n"
        f"    print(json.dumps(sys.argv[1:]), file=file)\nsys.exit({code_of_check} if 'check' in sys.argv else 0)\n"
    )
    python.chmod(0o755)
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder), "JOB_COMPLETION_INDEX": "1"}
    env |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.mark.parametrize("name", ["My_Run", ODD])
def test_commands_keep_every_word_whole(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (folder / "My_Run.yaml").rename(folder / f"{name}.yaml")
    config, _, pod = jobset_of(submit(capsys, *K8S, conf=f"{name}.yaml"))
    (file,) = config["data"]
    own = [] if name == "My_Run" else ["run_name='it\\'s 100% $odd'"]
    code, (check, train) = recorded(folder, pod["containers"][0]["command"][2])
    assert code == 0 and check == ["-m", "automodel_cli", "check", "-c", f"/etc/automodel/{file}", *own]
    words = ["finetune", "llm", "-c", f"/etc/automodel/{file}", "checkpoint.resume=auto", *own]
    assert train[train.index("finetune") :] == words
    assert not own or compose(folder / f"{name}.yaml", own).tree["run_name"] == name
    assert train[train.index("--node-rank") + 1] == "1"
    (folder / "work space").mkdir()
    task = yaml.safe_load(submit(capsys, "--to", "skypilot", "--volume", f"r:{folder}/work space", conf=f"{name}.yaml"))
    code, (_, check) = recorded(folder, task["setup"])
    assert code == 0 and check == ["-m", "automodel_cli", "check", "-c", f"{folder}/{file}", *own]
    code, (train,) = recorded(folder, task["run"])
    assert code == 0 and train[train.index("--master-addr") + 1] == "10.0.0.1"
    written = yaml.safe_load(Path(train[train.index("-c") + 1]).read_text())
    assert written["train"]["global_batch_size"] == 4


def test_a_config_that_is_refused_ends_the_pod_with_its_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, job, pod = jobset_of(submit(capsys, *K8S))
    for code in job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]:
        found, calls = recorded(folder, pod["containers"][0]["command"][2], code_of_check=code)
        assert found == code and len(calls) == 1, "no rank is started"
    task = yaml.safe_load(submit(capsys, "--to", "skypilot", "--volume", f"r:{folder}", "--setup", "true"))
    assert recorded(folder, task["setup"], code_of_check=2)[0] == 2


def test_what_is_missing_or_belongs_to_slurm_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, code, values in (
        (("--to", "k8s", "--volume", "a:/b"), "missing_key", ("--to k8s", "--image")),
        (("--to", "k8s", "--image", "x"), "missing_key", ("--volume", "NAME:/PATH")),
        (
            ("--to", "skypilot", "--volume", "a:/b", "--partition", "gpu"),
            "unsupported_combination",
            ("--partition", "--to skypilot"),
        ),
        (("--volume", "a:/b"), "requires_setting", ("--volume", "--to k8s")),
        (("--secret", "HF_TOKEN"), "requires_setting", ("--secret", "--to k8s")),
        ((*K8S, "--env", "NCCL_DEBUG"), "invalid_value", ("--env NCCL_DEBUG", "NAME=VALUE")),
        ((*K8S, "--secret", "HF_TOKEN=hf_abc"), "invalid_value", ("--secret HF_TOKEN", "NAME=SECRET:KEY")),
        ((*K8S, "--rdma", "8"), "invalid_value", ("--rdma 8", "RESOURCE=N")),
        ((*SKYPILOT, "--rdma", "rdma/ib=8"), "unsupported_combination", ("--rdma", "--to skypilot")),
    ):
        assert run(["submit", "-c", "My_Run.yaml", *SIZE, *more, "mesh.dp_size=2"]) == 2
        said = capsys.readouterr().err
        assert "hf_abc" not in said, "a secret is not repeated"
        assert_error(said, code, values=values)
    without = [word for word in SIZE if word != "--dry-run"]
    assert run(["submit", "-c", "My_Run.yaml", *without, "--to", "k8s", "mesh.dp_size=2"]) == 2
    assert_error(capsys.readouterr().err, "requires_setting", "--dry-run", values=("--to k8s",))


def test_a_skypilot_task_has_the_fields_of_its_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = yaml.safe_load(submit(capsys, *SKYPILOT, "--image", "me/automodel:1"))
    validate(task, "skypilot_task")
    validate(task["resources"], "skypilot_resources")
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
