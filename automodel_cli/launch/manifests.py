"""Files for other schedulers than Slurm: a Kubernetes JobSet with its ConfigMap, a SkyPilot task. Pure text.

JobSet (jobset.x-k8s.io/v1alpha2) is what Kubeflow's Trainer makes of its TrainJobs, and takes volumes as pods do. Every
node runs torchrun; where one fails all start again, and the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from automodel_cli.config.errors import ConfigError

_PORT = 29500
_CONFIG = "/etc/automodel"


@dataclass(frozen=True, kw_only=True)
class CloudJob:
    """One run on `nodes` x `ranks_per_node`. `config` is the composed config as YAML, `volume` is `NAME:PATH`: storage
    that all nodes see, and where relative paths of the config (`output_dir`) begin."""

    name: str
    config: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    volume: str | None
    image: str | None
    gpu_type: str | None
    cpus_per_task: int | None
    notice: int
    max_requeues: int
    setup: tuple[str, ...]
    trust: tuple[str, ...]

    def k8s(self) -> str:
        """A ConfigMap and a JobSet, for `kubectl apply -f -`. Raises ConfigError for what is missing."""
        if self.image is None:
            raise ConfigError("--to k8s needs an image that holds automodel", fix="--image registry/automodel:0.1.0")
        claim, path = self._volume()
        name = self._dns_name()
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": self.max_requeues},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": self._job(name, claim, path)}}],
        }
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-config"},
            "data": {f"{self.name}.yaml": self.config},
        }
        jobset = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": spec,
        }
        return f"{_dump(config)}---\n{_dump(jobset)}"

    def skypilot(self) -> str:
        """A task for `sky jobs launch`. Raises ConfigError for what is missing."""
        name, path = self._volume()
        resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": self.max_requeues}}
        if self.gpus_per_node:
            if self.gpu_type is None:
                raise ConfigError("--to skypilot asks for GPUs by their name", fix="--gpu-type H100")
            resources["accelerators"] = f"{self.gpu_type}:{self.gpus_per_node}"
        if (cpus := self._cpus()) is not None:
            resources["cpus"] = f"{cpus}+"
        if self.image is not None:
            resources["image_id"] = f"docker:{self.image}"
        config = f"$HOME/{self.name}.yaml"
        here = f"cat > {config} <<'AUTOMODEL'\n{self.config}AUTOMODEL\n"
        address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'
        task = {
            "name": self._dns_name(),
            "num_nodes": self.nodes,
            "resources": resources,
            "volumes": {path: name},
            "setup": "\n".join(self.setup or ("python -m pip install automodel-cli",)) + "\n",
            "run": f"set -e\n{here}cd {shlex.quote(path)}\n{self._torchrun('$SKYPILOT_NODE_RANK', address, config)}\n",
        }
        return _dump(task)

    def _job(self, name: str, claim: str, path: str) -> Mapping[str, Any]:
        """The spec of the one Job: a pod a node."""
        address = f"{name}-node-0-0.{name}"  # jobset-job-index-pod.subdomain
        command = self._torchrun("$JOB_COMPLETION_INDEX", address, f"{_CONFIG}/{self.name}.yaml")
        limits: dict[str, Any] = {"nvidia.com/gpu": self.gpus_per_node} if self.gpus_per_node else {}
        if (cpus := self._cpus()) is not None:
            limits["cpu"] = cpus
        container = {
            "name": "automodel",
            "image": self.image,
            "workingDir": path,
            "command": ["bash", "-c", "\n".join([*self.setup, f"exec {command}"])],
            "resources": {"limits": limits},
            "volumeMounts": [
                {"name": "run", "mountPath": path},
                {"name": "config", "mountPath": _CONFIG},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        volumes = [
            {"name": "run", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "config", "configMap": {"name": f"{name}-config"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.notice,
            "containers": [container],
            "volumes": volumes,
        }
        sizes = {"parallelism": self.nodes, "completions": self.nodes, "completionMode": "Indexed", "backoffLimit": 0}
        return {**sizes, "template": {"spec": pod}}

    def _torchrun(self, node: str, address: str, config: str) -> str:
        trust = shlex.join(self.trust)
        return (
            f"python -m torch.distributed.run --nnodes {self.nodes} --nproc-per-node {self.ranks_per_node} "
            f"--node-rank {node} --master-addr {address} --master-port {_PORT} -m automodel_cli "
            f"finetune llm -c {config} checkpoint.resume=auto{' ' + trust if trust else ''}"
        )

    def _volume(self) -> tuple[str, str]:
        name, _, path = (self.volume or "").partition(":")
        if not name or not path.startswith("/"):
            raise ConfigError(
                f"--volume {self.volume or '(none)'}: NAME:/PATH is expected, storage that all nodes see and that "
                "stays (a bucket that is mounted cannot rename, as checkpoints are)",
                fix="--volume my-claim:/work",
            )
        return name, str(PurePosixPath(path))

    def _cpus(self) -> int | None:
        return None if self.cpus_per_task is None else self.cpus_per_task * self.ranks_per_node

    def _dns_name(self) -> str:
        """As Kubernetes wants names: lower-case letters, digits and dashes, so short that a pod's name still fits."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "run"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _dump(value: Mapping[str, Any]) -> str:
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=10**6)
