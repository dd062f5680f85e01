"""vLLM servers that the run starts. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar

from automodel_cli.launch.generation_servers import HOST, PORT
from automodel_cli.rollout.engines.servers.managed_servers import (
    ManagedServers,
    ServerRequirements,
    requires_trust_unless,
)


@dataclass(frozen=True)
class VLLMServers(ManagedServers):
    """vLLM servers that the run starts and stops (`vllm serve`, see `ManagedServers`). `expert_parallel` distributes
    the experts over all GPUs of a server."""

    engine: ClassVar[str] = "vLLM"
    routing_needs_gpus: ClassVar[str | None] = "its second model runner needs Triton"

    executable: str | list[str] = field(default="vllm", metadata=requires_trust_unless("vllm"))
    """Executable and first arguments of the server, for an engine in another environment. Requires `--trust
    command`."""

    def command(self, model: str, wanted: ServerRequirements) -> list[str]:
        """See `ManagedServers`."""
        backend = None if wanted.transport == "files" else wanted.transport
        words = ["env", "VLLM_SERVER_DEV_MODE=1"]
        words += ["VLLM_USE_V2_MODEL_RUNNER=1"] if wanted.routing else []  # the only one with routed experts
        words += ["VLLM_ALLOW_INSECURE_SERIALIZATION=1"] if backend == "ipc" else []  # handles travel as pickles
        words += [*self.words(), "serve", model, "--host", HOST, "--port", PORT]
        words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        words += ["--max-model-len", str(wanted.max_tokens), "--dtype", self.dtype]
        words += [] if wanted.model.revision is None else ["--revision", wanted.model.revision]
        words += ["--trust-remote-code"] if wanted.model.trust_remote_code else []
        words += ["--enable-return-routed-experts"] if wanted.routing else []
        words += self._on_gpus(colocated=wanted.colocated) if self.gpus_per_server else []
        return words if backend is None else [*words, "--weight-transfer-config", json.dumps({"backend": backend})]

    def _on_gpus(self, *, colocated: bool) -> list[str]:
        words = ["--tensor-parallel-size", str(self.tensor_parallel_size), "--data-parallel-size", str(self.copies)]
        words += ["--enable-expert-parallel"] if self.expert_parallel else []
        if (share := self.share(colocated=colocated)) is not None:
            words += ["--gpu-memory-utilization", f"{share:g}"]
        return [*words, "--enable-sleep-mode"] if colocated else words
