"""SGLang servers that the run starts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch.generation_servers import HOST, PORT
from automodel_cli.rollout.engines.servers.managed_servers import (
    ManagedServers,
    ServerRequirements,
    requires_trust_unless,
)

_KEPT_BACK = 6
"""Tokens that SGLang 0.5.23 reserves in its context (`TpWorker.get_worker_info`, `init_req_max_new_tokens`). The
longest samples would otherwise end early with reason `length`. The context may then exceed the length of the model,
which SGLang must allow. No token is placed there."""
_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"


@dataclass(frozen=True)
class SGLangServers(ManagedServers):
    """SGLang servers that the run starts and stops (`sglang serve`, see `ManagedServers`). `expert_parallel`
    distributes complete experts over the GPUs of a copy instead of sharding each."""

    engine: ClassVar[str] = "SGLang"

    port: int = 30_000
    """Port of a machine's first SGLang server. The others follow."""
    executable: str | list[str] = field(default="sglang", metadata=requires_trust_unless("sglang"))
    """Executable and first arguments of the server, for an engine in another environment. Requires `--trust
    command`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "expert_parallel requires tensor_parallel_size above 1: SGLang distributes experts over the GPUs of "
                "a model copy",
                code="requires_setting",
                keys=("expert_parallel", "tensor_parallel_size"),
                fix=f"tensor_parallel_size={self.gpus_per_server}"
                if self.gpus_per_server > 1
                else "expert_parallel=false",
            )

    def command(self, model: str, wanted: ServerRequirements) -> list[str]:
        """See `ManagedServers`."""
        words = ["env", _LONGER, *([] if self.gpus_per_server else ["SGLANG_USE_CPU_ENGINE=1"])]
        words += [*self.words(), "serve", "--model-path", model, "--host", HOST, "--port", PORT]
        words += ["--context-length", str(wanted.max_tokens + _KEPT_BACK), "--dtype", self.dtype]
        words += [] if wanted.model.revision is None else ["--revision", wanted.model.revision]
        words += ["--trust-remote-code"] if wanted.model.trust_remote_code else []
        words += ["--enable-return-routed-experts"] if wanted.routing else []
        return words + (self._on_gpus(colocated=wanted.colocated) if self.gpus_per_server else ["--device", "cpu"])

    def _on_gpus(self, *, colocated: bool) -> list[str]:
        words = ["--tp-size", str(self.tensor_parallel_size), "--dp-size", str(self.copies)]
        words += ["--ep-size", str(self.tensor_parallel_size)] if self.expert_parallel else []
        if (share := self.share(colocated=colocated)) is not None:
            words += ["--mem-fraction-static", f"{share:g}"]
        return [*words, "--enable-memory-saver"] if colocated else words
