"""Generation servers that a run starts itself: how many, on how many GPUs, by which command. Torch-free."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from automodel_cli.config import trust
from automodel_cli.config.errors import ConfigError
from automodel_cli.launch.generation_servers import GenerationServers

if TYPE_CHECKING:
    from automodel_cli.models.config import ModelConfig


@dataclass(frozen=True)
class ServerRequirements:
    """What a run needs of each of its servers: the model, room for `max_tokens` (the longest prompt with its response),
    weights that come by `transport`, GPUs `colocated` with the ranks', and, with `routing`, that it tells which experts
    tokens go to."""

    model: ModelConfig
    max_tokens: int
    transport: str
    colocated: bool = False
    routing: bool = False


def requires_trust_unless(name: str) -> Mapping[str, Any]:
    """The metadata of a program that is `name` unless the user trusts another."""
    return trust.executes_code(trust.COMMAND, "is a program that the run starts", when=lambda value: value != name)


@dataclass(frozen=True)
class ManagedServers(ABC):
    """Servers that the run starts and ends, each with the whole model.

    `num_servers` of them over all machines, with `gpus_per_server` each (0: on the CPU). A copy of the model takes
    `tensor_parallel_size` of
    the GPUs, so a server holds gpus / tensor_parallel copies, which share its requests. `port` is that of a machine's
    first server, the others follow.

    `dtype`: what the server computes in; it should be what the trainer does (`param_dtype` of its mixed precision).
    auto: as the checkpoint is, but half precision for one in float32.

    `gpu_memory_utilization`: the share of each GPU's memory that the server takes. null: its own choice where it has
    the GPU for
    itself, 0.5 where it shares it (`rollout.placement=colocated`); what the trainer holds then must fit beside it.

    The command is the engine's own with what training needs. `executable` are other words for its beginning (an
    engine in
    another environment), `extra_args` further words for its end; the command line must allow both: `--trust command`.
    """

    engine: ClassVar[str]
    """What it is called."""
    routing_needs_gpus: ClassVar[str | None] = None
    """Why it cannot tell experts on a CPU."""

    num_servers: int = 1
    """Number of servers over all machines."""
    gpus_per_server: int = 1
    """GPUs per server. 0: on the CPU."""
    tensor_parallel_size: int = 1
    """GPUs per copy of the model. A server holds gpus_per_server / tensor_parallel_size copies."""
    expert_parallel: bool = False
    """Distribute experts over a copy's GPUs instead of sharding each expert."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype of the server. It should equal the trainer's. `auto`: the checkpoint's, half precision for
    float32."""
    gpu_memory_utilization: float | None = None
    """Fraction of each GPU's memory for the server. null: the server's default, 0.5 if colocated."""
    port: int = 8000
    """Port of a machine's first server. The others follow."""
    executable: str | list[str] = ""
    extra_args: list[str] = field(
        default_factory=list,
        metadata=trust.executes_code(trust.COMMAND, "are options of a program that the run starts, and may name code"),
    )
    """Additional arguments of the server. Requires `--trust command`."""

    def __post_init__(self) -> None:
        for name, least in (("num_servers", 1), ("gpus_per_server", 0), ("tensor_parallel_size", 1), ("port", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name}={value} must be at least {least}", code="out_of_range", keys=(name,), fix=f"{name}={least}"
                )
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
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization < 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and below 1",
                code="out_of_range",
                keys=("gpu_memory_utilization",),
                fix="gpu_memory_utilization=0.5",
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
        """The share of each GPU's memory; None is the server's own choice."""
        return 0.5 if self.gpu_memory_utilization is None and colocated else self.gpu_memory_utilization

    def started_for(self, wanted: ServerRequirements) -> GenerationServers:
        """What a run starts. Raises ConfigError for a model that the server cannot be given by its name."""
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
        """The words that start a server of `model` (a folder, or a name on the hub), with `HOST` and `PORT` of
        `launch.servers` where it is to listen."""
