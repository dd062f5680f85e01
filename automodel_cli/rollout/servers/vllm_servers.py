"""The vLLM servers that a run starts itself: how many, on how many GPUs, by which command. Torch-free."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from automodel_cli.config import trust
from automodel_cli.config.errors import ConfigError
from automodel_cli.launch.servers import HOST, PORT, GenerationServers

if TYPE_CHECKING:
    from automodel_cli.models.config import ModelConfig


@dataclass(frozen=True)
class VLLMServers:
    """vLLM servers that the run starts and ends, each with the whole model.

    `number` of them over all machines, with `gpus` each (0: on the CPU). A copy of the model takes `tensor_parallel` of
    the GPUs, so a server holds gpus / tensor_parallel copies, which share its requests; `expert_parallel` spreads the
    experts of a mixture over all GPUs of a server. `port` is that of a machine's first server, the others follow.

    `dtype`: what vLLM computes in; it should be what the trainer does (`param_dtype` of its mixed precision). auto: as
    the checkpoint is, but half precision for one in float32.

    `memory_share`: the share of each GPU's memory that vLLM takes. null: vLLM's own choice where it has the GPU for
    itself, 0.5 where it shares it (`rollout.placement=colocated`); what the trainer holds then must fit beside it.

    The command is `vllm serve` with what training needs. `program` are other words for its beginning (a vLLM in
    another environment), `options` further words for its end; the command line must allow both: `--trust command`.
    """

    number: int = 1
    gpus: int = 1
    tensor_parallel: int = 1
    expert_parallel: bool = False
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    memory_share: float | None = None
    port: int = 8000
    program: str | list[str] = field(
        default="vllm",
        metadata=trust.runs(trust.COMMAND, "is a program that the run starts", when=lambda value: value != "vllm"),
    )
    options: list[str] = field(
        default_factory=list,
        metadata=trust.runs(trust.COMMAND, "are options of a program that the run starts, and may name code"),
    )

    def __post_init__(self) -> None:
        for name, least in (("number", 1), ("gpus", 0), ("tensor_parallel", 1), ("port", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}={value} must be at least {least}", keys=(name,), fix=f"{name}={least}")
        if self.gpus % self.tensor_parallel:
            raise ConfigError(
                f"gpus={self.gpus} of a server are no whole number of copies of tensor_parallel={self.tensor_parallel}",
                keys=("gpus", "tensor_parallel"),
                fix=f"gpus={self.tensor_parallel}",
            )
        if self.gpus == 0 and (self.expert_parallel or self.tensor_parallel > 1):
            key = "expert_parallel" if self.expert_parallel else "tensor_parallel"
            raise ConfigError(f"{key} spreads a model over GPUs, and gpus=0", keys=(key, "gpus"), fix="gpus=1")
        if self.memory_share is not None and not 0 < self.memory_share < 1:
            raise ConfigError(
                f"memory_share={self.memory_share} must be above 0 and below 1",
                keys=("memory_share",),
                fix="memory_share=0.5",
            )
        if not self.words():
            raise ConfigError(f"program={self.program!r} names no program", keys=("program",), fix="program=vllm")

    def words(self) -> list[str]:
        """Of the program."""
        return shlex.split(self.program) if isinstance(self.program, str) else list(self.program)

    def share(self, *, colocated: bool) -> float | None:
        """The share of each GPU's memory; None is vLLM's own choice."""
        return 0.5 if self.memory_share is None and colocated else self.memory_share

    def started_for(
        self, model: ModelConfig, *, max_tokens: int, backend: str | None, colocated: bool, routing: bool = False
    ) -> GenerationServers:
        """What a run of `model` starts. `max_tokens`: the longest prompt with its response; `backend`: how vLLM is to
        receive weights, besides from files; `routing`: it tells which experts tokens go to. Raises ConfigError for a
        model that vLLM cannot be given by its name."""
        if model.pretrained is None:
            raise ConfigError(
                "rollout.engine.servers start vLLM on model.pretrained, and this model has none",
                keys=("rollout.engine.servers", "model.pretrained"),
                fix="rollout.engine.servers=null rollout.engine.url=http://localhost:8000",
            )
        words = ["env", "VLLM_SERVER_DEV_MODE=1"]
        words += ["VLLM_USE_V2_MODEL_RUNNER=1"] if routing else []  # the only one that tells experts
        words += ["VLLM_ALLOW_INSECURE_SERIALIZATION=1"] if backend == "ipc" else []  # handles travel as pickles
        words += [*self.words(), "serve", model.pretrained, "--host", HOST, "--port", PORT]
        words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        words += ["--max-model-len", str(max_tokens), "--dtype", self.dtype]
        words += [] if model.revision is None else ["--revision", model.revision]
        words += ["--trust-remote-code"] if model.trust_remote_code else []
        words += ["--enable-return-routed-experts"] if routing else []
        words += self._on_gpus(colocated=colocated) if self.gpus else []
        if backend is not None:
            words += ["--weight-transfer-config", json.dumps({"backend": backend})]
        share = self.share(colocated=colocated)
        return GenerationServers(self.number, self.gpus, self.port, (*words, *self.options), colocated, share)

    def _on_gpus(self, *, colocated: bool) -> list[str]:
        copies = self.gpus // self.tensor_parallel
        words = ["--tensor-parallel-size", str(self.tensor_parallel), "--data-parallel-size", str(copies)]
        words += ["--enable-expert-parallel"] if self.expert_parallel else []
        if (share := self.share(colocated=colocated)) is not None:
            words += ["--gpu-memory-utilization", f"{share:g}"]
        return [*words, "--enable-sleep-mode"] if colocated else words
