"""Config of servers that the run starts: number, GPUs and command. Torch-free."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import check_minimums, check_range
from automodel_cli.launch.generation_servers import GenerationServers

if TYPE_CHECKING:
    from automodel_cli.models.config import ModelConfig


@dataclass(frozen=True)
class ServerRequirements:
    """Requirements of a run on its servers: the model, `max_tokens` (the longest prompt with its response), the weight
    `transport`, whether GPUs are `colocated` with ranks, and whether routed experts are needed (`routing`)."""

    model: ModelConfig
    max_tokens: int
    transport: str
    colocated: bool = False
    routing: bool = False


def requires_trust_unless(name: str) -> Mapping[str, object]:
    """The metadata of a program that is `name` unless the user trusts another."""
    return trust.executes_code(trust.COMMAND, "is a program that the run starts", when=lambda value: value != name)


@dataclass(frozen=True)
class ManagedServers(ABC):
    """Servers that the run starts and stops. Each server has the complete model.

    - `num_servers` over all nodes, with `gpus_per_server` each (0: on the CPU). A copy of the model uses
      `tensor_parallel_size` GPUs. Example: 4 GPUs with tensor_parallel_size=2 hold two copies, which share the
      requests of the server.
    - `port` is the port of the first server of a node. The others use the following ports.
    - `dtype` should equal the compute dtype of the trainer (`param_dtype` of mixed precision). auto: dtype of the
      checkpoint, or half precision for a float32 checkpoint.
    - `gpu_memory_utilization`: share of each GPU's memory. null: default of the server, or 0.5 with
      `rollout.placement=colocated`. The trainer must fit into the rest.
    - `executable` replaces the first words of the command (an engine in another environment), `extra_args` are
      appended. The command line must allow both with `--trust command`.
    """

    engine: ClassVar[str]
    """Name of the server program."""
    routing_needs_gpus: ClassVar[str | None] = None
    """Reason why the server cannot return routed experts on a CPU."""

    num_servers: int = 1
    """Number of servers over all machines."""
    gpus_per_server: int = 1
    """GPUs per server. 0: on the CPU."""
    tensor_parallel_size: int = 1
    """GPUs per copy of the model. A server holds gpus_per_server / tensor_parallel_size copies."""
    expert_parallel: bool = False
    """Distribute complete experts over the GPUs of a copy instead of sharding each expert."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype of the server. It should equal the trainer's. `auto`: the checkpoint's, half precision for
    float32."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's memory for the server. null: default of the server, or 0.5 if colocated."""
    port: int = 8000
    """Port of a machine's first server. The others follow."""
    executable: str | list[str] = ""
    extra_args: list[str] = field(
        default_factory=list,
        metadata=trust.executes_code(trust.COMMAND, "are options of a program that the run starts, and may name code"),
    )
    """Additional arguments of the server's command; needs `--trust command`."""

    def __post_init__(self) -> None:
        check_minimums(self, num_servers=1, gpus_per_server=0, tensor_parallel_size=1, port=1)
        if self.gpus_per_server % self.tensor_parallel_size:
            raise ConfigError(
                f"gpus_per_server={self.gpus_per_server} must be a multiple of "
                f"tensor_parallel_size={self.tensor_parallel_size}",
                code="not_divisible",
                keys=("gpus_per_server", "tensor_parallel_size"),
                fix=f"gpus_per_server={self.tensor_parallel_size}",
            )
        if self.gpus_per_server == 0 and (self.expert_parallel or self.tensor_parallel_size > 1):
            key = "expert_parallel" if self.expert_parallel else "tensor_parallel_size"
            raise ConfigError(
                f"{key}={getattr(self, key)} requires GPUs, but gpus_per_server=0",
                code="requires_setting",
                keys=(key, "gpus_per_server"),
                fix="gpus_per_server=1",
            )
        check_range(
            "gpu_memory_utilization", self.gpu_memory_utilization, above=0, below=1, fix="gpu_memory_utilization=0.5"
        )
        if not self.words():
            own = type(self).executable
            raise ConfigError(
                f"executable={self.executable!r} contains no program",
                code="empty_value",
                keys=("executable",),
                fix=f"executable={own}",
            )

    def words(self) -> list[str]:
        """Of the program."""
        return shlex.split(self.executable) if isinstance(self.executable, str) else list(self.executable)

    @property
    def copies(self) -> int:
        """Of the model, in each server on GPUs."""
        return self.gpus_per_server // self.tensor_parallel_size

    def share(self, *, colocated: bool) -> float | None:
        """Return the share of each GPU's memory. None is the default of the server."""
        return 0.5 if self.gpu_memory_utilization is None and colocated else self.gpu_memory_utilization

    def started_for(self, wanted: ServerRequirements) -> GenerationServers:
        """Return the servers to start. Raise ConfigError if the model has no name to load."""
        if wanted.model.pretrained is None:
            raise ConfigError(
                f"rollout.engine.servers requires model.pretrained, because {self.engine} loads the model by name",
                code="requires_setting",
                keys=("rollout.engine.servers", "model.pretrained"),
                fix="rollout.engine.servers=null rollout.engine.url=http://localhost:8000",
            )
        command = (*self.command(wanted.model.pretrained, wanted), *self.extra_args)
        share = self.share(colocated=wanted.colocated)
        return GenerationServers(self.num_servers, self.gpus_per_server, self.port, command, wanted.colocated, share)

    @abstractmethod
    def command(self, model: str, wanted: ServerRequirements) -> Sequence[str]:
        """Return the command of a server of `model` (a folder or hub name). It contains `HOST` and `PORT` of
        `launch.servers`."""
