"""Job files for Kubernetes (JobSet and ConfigMap) and SkyPilot.

JobSet (jobset.x-k8s.io/v1alpha2) is the resource that Kubeflow's Trainer creates from its TrainJobs. Volumes are those
of pods. Every node runs torchrun. If one fails, all restart and the run resumes from its newest checkpoint.
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
_CONTAINER = "automodel"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CAUSES_THAT_STAY = (2, 3)
"""Exit codes of `automodel check`, usage or config and data: another attempt would meet them again."""
_SECONDS_TO_END = 10
"""Part of the notice period that torchrun reserves to end after its ranks."""


@dataclass(frozen=True, kw_only=True)
class CloudJob:
    """One run on `nodes` x `ranks_per_node`. `config` is the composed config as YAML. `volume` is `NAME:PATH`: shared
    storage, and the base of relative paths in the config (`output_dir`)."""

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
    env: tuple[str, ...] = ()
    """`NAME=VALUE` each."""
    secrets: tuple[str, ...] = ()
    """`NAME` or, for Kubernetes, `NAME=SECRET:KEY` each."""
    rdma: str | None = None
    """`RESOURCE=N`: devices of a fast network that a pod requests."""

    def k8s(self) -> str:
        """Return a ConfigMap and a JobSet, for `kubectl apply -f -`. Raises ConfigError for missing options."""
        if self.image is None:
            raise ConfigError(
                "--to k8s requires --image, a container image with automodel",
                code="missing_key",
                keys=("--image",),
                fix="--image registry/automodel:latest",
            )
        if self.rdma is not None:
            self._rdma()
        claim, path = self._volume()
        name = self._dns_name()
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {
                "maxRestarts": self.max_requeues,
                "rules": [{"name": "config", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": self._job(name, claim, path)}}],
        }
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-config"},
            "data": {self._file(): self.config},
        }
        jobset = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": spec,
        }
        return f"{_dump(config)}---\n{_dump(jobset)}"

    def skypilot(self) -> str:
        """Return a task for `sky jobs launch`. Raises ConfigError for missing options."""
        name, path = self._volume()
        resources: dict[str, object] = {"job_recovery": {"max_restarts_on_errors": self.max_requeues}}
        if self.gpus_per_node:
            if self.gpu_type is None:
                raise ConfigError(
                    "--to skypilot requires --gpu-type, because SkyPilot requests GPUs by name",
                    code="missing_key",
                    keys=("--gpu-type",),
                    fix="--gpu-type H100",
                )
            resources["accelerators"] = f"{self.gpu_type}:{self.gpus_per_node}"
        if (cpus := self._cpus()) is not None:
            resources["cpus"] = f"{cpus}+"
        if self.image is not None:
            resources["image_id"] = f"docker:{self.image}"
        if self.rdma is not None:
            raise ConfigError(
                "--rdma is not supported with --to skypilot, which has no such resource",
                code="unsupported_combination",
                keys=("--rdma", "--to"),
                fix="remove --rdma",
            )
        config = f'"$HOME/{self._file()}"'
        end = self._end_of_text()
        here = f"cat > {config} <<'{end}'\n{self.config.rstrip()}\n{end}\ncd {shlex.quote(path)}\n"
        setup = "\n".join(self.setup or ("python -m pip install automodel-cli",))
        address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'
        task = {
            "name": self._dns_name(),
            "num_nodes": self.nodes,
            "resources": resources,
            "volumes": {path: name},
            "envs": self._variables(path),
            **({"secrets": dict.fromkeys(secret for secret, _, _ in self._secrets())} if self.secrets else {}),
            # SkyPilot retries a failed run but not a failed setup, so permanent errors are detected in the setup.
            "setup": f"set -e\n{setup}\n{here}{self._check(config)}\n",
            "run": f"set -e\n{here}{self._torchrun('$SKYPILOT_NODE_RANK', address, config)}\n",
        }
        return _dump(task)

    def _job(self, name: str, claim: str, path: str) -> Mapping[str, object]:
        """The spec of the one Job: a pod a node."""
        address = f"{name}-node-0-0.{name}"  # jobset-job-index-pod.subdomain
        config = f"{_CONFIG}/{self._file()}"
        command = self._torchrun("$JOB_COMPLETION_INDEX", address, config)
        limits: dict[str, Any] = {"nvidia.com/gpu": self.gpus_per_node} if self.gpus_per_node else {}
        limits |= self._rdma()
        if (cpus := self._cpus()) is not None:
            limits["cpu"] = cpus
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "env": self._container_env(path),
            "workingDir": path,
            "command": ["bash", "-c", "\n".join([*self.setup, f"{self._check(config)} || exit", f"exec {command}"])],
            "resources": {"limits": limits},
            "volumeMounts": [
                {"name": "run", "mountPath": path},
                {"name": "config", "mountPath": _CONFIG},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        if self.rdma is not None:  # to register memory with the network card
            container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
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
        codes = {"containerName": _CONTAINER, "operator": "In", "values": list(_CAUSES_THAT_STAY)}
        policy = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        return {**sizes, "podFailurePolicy": policy, "template": {"spec": pod}}

    def _torchrun(self, node: str, address: str, config: str) -> str:
        return (
            f"python -m torch.distributed.run --nnodes {self.nodes} --nproc-per-node {self.ranks_per_node} "
            f"--node-rank {node} --master-addr {address} --master-port {_PORT} -m automodel_cli "
            f"finetune llm -c {config} {shlex.join(('checkpoint.resume=auto', *self._words()))}"
        )

    def _check(self, config: str) -> str:
        """Return the command that detects errors which a retry would repeat."""
        words = shlex.join(self._words())
        return f"python -m automodel_cli check -c {config}{' ' if words else ''}{words}"

    def _words(self) -> tuple[str, ...]:
        """Return the run's name, if its file cannot contain it, and the trust options."""
        name = "'" + self.name.replace("\\", "\\\\").replace("'", "\\'") + "'"
        return (*(() if self._file() == f"{self.name}.yaml" else (f"run_name={name}",)), *self.trust)

    def _file(self) -> str:
        """The name of the config's file: a key of a ConfigMap, and a word of a shell."""
        return re.sub(r"[^-._a-zA-Z0-9]+", "-", self.name) + ".yaml"

    def _end_of_text(self) -> str:
        lines, end = self.config.splitlines(), "AUTOMODEL"
        while end in lines:
            end += "_"
        return end

    def _variables(self, path: str) -> dict[str, str]:
        """Return the environment of the ranks: caches on the persistent volume, and the variable of torchrun's
        --shutdown-timeout (torch 2.11 has no option). Its default would kill the ranks 30 s after TERM."""
        variables = {
            "HF_HOME": f"{path}/.cache/huggingface",
            "AUTOMODEL_CACHE": f"{path}/.cache/automodel",
            "PET_SHUTDOWN_TIMEOUT": str(max(1, self.notice - _SECONDS_TO_END)),
        }
        for given in self.env:
            name, equals, value = given.partition("=")
            if not equals or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"--env {given} must have the form NAME=VALUE",
                    code="invalid_value",
                    keys=("--env",),
                    fix="--env NCCL_DEBUG=INFO",
                )
            variables[name] = value
        return variables

    def _container_env(self, path: str) -> list[dict[str, object]]:
        values: list[dict[str, Any]] = [{"name": n, "value": value} for n, value in self._variables(path).items()]
        references = [(n, {"secretKeyRef": {"name": secret, "key": key}}) for n, secret, key in self._secrets()]
        return [*values, *({"name": n, "valueFrom": reference} for n, reference in references)]

    def _secrets(self) -> list[tuple[str, str, str]]:
        """Return variable, Secret and its key. By default a Secret has the name of the variable in lower case."""
        secrets = []
        for given in self.secrets:
            name, equals, where = given.partition("=")
            secret, colon, key = where.partition(":")
            if not _NAME.fullmatch(name) or (equals and not (secret and colon and key)):
                raise ConfigError(
                    f"--secret {name or given} must have the form NAME or NAME=SECRET:KEY; the file must not contain "
                    "the secret itself",
                    code="invalid_value",
                    keys=("--secret",),
                    fix="--secret HF_TOKEN=hub:token",
                )
            secrets.append((name, secret or name.lower().replace("_", "-"), key or name))
        return secrets

    def _rdma(self) -> dict[str, int]:
        if self.rdma is None:
            return {}
        name, _, number = self.rdma.partition("=")
        if "/" not in name or not number.isdecimal() or not int(number):
            raise ConfigError(
                f"--rdma {self.rdma} must have the form RESOURCE=N, with the resource name of the device plugin",
                code="invalid_value",
                keys=("--rdma",),
                fix="--rdma rdma/ib=8",
            )
        return {name: int(number)}

    def _volume(self) -> tuple[str, str]:
        name, _, path = (self.volume or "").partition(":")
        if not name or not path.startswith("/"):
            given = "--volume is required and" if self.volume is None else f"--volume {self.volume}"
            raise ConfigError(
                f"{given} must have the form NAME:/PATH: persistent storage that all nodes share and that can rename "
                "files (a mounted bucket cannot)",
                code="missing_key" if self.volume is None else "invalid_value",
                keys=("--volume",),
                fix="--volume my-claim:/work",
            )
        return name, str(PurePosixPath(path))

    def _cpus(self) -> int | None:
        return None if self.cpus_per_task is None else self.cpus_per_task * self.ranks_per_node

    def _dns_name(self) -> str:
        """As Kubernetes wants names: lower-case letters, digits and dashes, so short that a pod's name still fits."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "run"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _dump(value: Mapping[str, object]) -> str:
    return str(yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=10**6))
