"""Config of SGLang servers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.engines.config import LiveServerConfig, address_for
from automodel_cli.rollout.engines.servers.launch_commands import SGLANG_WITH_EXPERTS
from automodel_cli.rollout.engines.servers.sglang_servers import SGLangServers

if TYPE_CHECKING:
    from automodel_cli.rollout.engines.base import Engine, EngineContext
    from automodel_cli.rollout.engines.live_update import WeightUpdateMixin
    from automodel_cli.rollout.http import Server
    from automodel_cli.rollout.types import SamplingParams
    from automodel_cli.rollout.weight_sync.transports import Transfer


@dataclass(frozen=True)
class SGLangConfig(LiveServerConfig):
    """SGLang server (0.5.21 or later) with weight updates after each step. docs/rollout.md has its command line.

    Values of `transport`:

    - `files`: the run writes weights to `weights_dir`, and SGLang reads the same path. null: `rollout_weights` in the
      run directory.
    - `broadcast`: from the first rank to all servers, with NCCL between GPUs, or gloo if the run is on the CPU.
      `address` is the machine of the first rank as seen by SGLang (null: this host name, or 127.0.0.1 for a local
      server). `port` is a free port on it.

    A list of addresses means several servers of the same model. For `command` see `LiveServerConfig`.
    """

    transports: ClassVar[tuple[str, ...]] = ("files", "broadcast")
    untrusted: ClassVar[str] = "SGLang's log-probs are those of the distribution that it is asked to draw from"
    with_experts: ClassVar[str] = SGLANG_WITH_EXPERTS

    servers: SGLangServers | None = None
    """SGLang servers that the run starts, instead of `url`."""
    transport: Literal["files", "broadcast"] = "files"
    """How weights reach SGLang: `files`, or `broadcast` (NCCL between GPUs, gloo on the CPU)."""

    @property
    def way(self) -> str:
        return self.transport

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            raise ConfigError(
                f"model={self.model} is not supported: an SGLang server serves one model, and /generate "
                "has no model name",
                code="not_supported",
                keys=("model",),
                fix="model=null",
            )
        if self.transport == "broadcast" and self.servers is not None and self.servers.copies > 1:
            raise ConfigError(
                f"transport=broadcast is not supported with {self.servers.copies} copies of the model in a server "
                f"(servers.gpus_per_server={self.servers.gpus_per_server}, "
                f"servers.tensor_parallel_size={self.servers.tensor_parallel_size})",
                code="unsupported_combination",
                keys=("transport", "servers.gpus_per_server", "servers.tensor_parallel_size"),
                fix="transport=files",
            )

    def check_params(self, params: SamplingParams) -> None:
        """See `LiveServerConfig`. SGLang applies top_p to the complete vocabulary, even with top_k, and returns
        log-probs before it."""
        if params.top_p < 1:
            raise ConfigError(
                f"top_p={params.top_p} is not supported: SGLang returns log-probs before top-p filtering",
                code="not_supported",
                keys=("top_p", "engine"),
                fix="rollout.top_p=1.0",
            )

    def build(self, host: EngineContext) -> Engine:
        """See `EngineConfig`."""
        urls = self._started(host)
        if self.transport == "files":
            return host.on_first_rank(lambda: self._served(host, urls))
        from automodel_cli.rollout.weight_sync.broadcast import GroupTransfer

        address = self.address or address_for(urls[0])
        return host.on_first_rank(lambda: self._served(host, urls, GroupTransfer(address, self.port, host.device)))

    def _engine(self, server: Server, host: EngineContext, transfer: Transfer) -> WeightUpdateMixin:
        from automodel_cli.rollout.engines.servers.sglang import SGLangEngine

        return SGLangEngine(
            server,
            host.tokenizer,
            transfer,
            concurrency=self.concurrency,
            stop_token_ids=host.stop_token_ids,
            num_layers=host.num_layers,
        )
