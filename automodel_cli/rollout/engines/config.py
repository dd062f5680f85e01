"""Config classes of the engines. Torch-free."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal
from urllib.parse import urlsplit

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import check_choice, check_minimums, check_range
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.engines.servers.launch_commands import VLLM_WITH_EXPERTS
from automodel_cli.rollout.engines.servers.managed_servers import ManagedServers
from automodel_cli.rollout.engines.servers.vllm_servers import VLLMServers
from automodel_cli.rollout.types import CudaGraphs

if TYPE_CHECKING:
    from automodel_cli.rollout.engines.base import Engine, EngineContext
    from automodel_cli.rollout.engines.live_update import WeightUpdateMixin
    from automodel_cli.rollout.http import Server
    from automodel_cli.rollout.types import SamplingParams
    from automodel_cli.rollout.weight_sync.transports import SharedTransfer, Transfer


@dataclass(frozen=True)
class SamplerConfig:
    """Built-in sampler on the trained weights. Needs no copy of the model and supports every layout.

    The KV cache has the size of `max_num_seqs` sequences of maximum length. `cuda_graphs=true` captures graphs under
    FSDP2 too. The startup summary shows why graphs are off. Not yet run on a GPU.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        logprobs=True, weight_updates=True, live_weights=True, routing=True
    )

    max_num_seqs: int | None = None
    """Sequences that are decoded together on each data-parallel rank. null: as many as fit into an eighth of the
    memory, at most 256."""
    max_num_batched_tokens: int = 8192
    """Maximum number of prompt tokens per prefill."""
    refill_threshold: float = 0.125
    """Fraction of free slots that triggers a prefill."""
    cuda_graphs: CudaGraphs = "auto"
    """Launch a decoding step as one CUDA graph. `auto`: on CUDA if a rank has unsharded weights."""

    def __post_init__(self) -> None:
        check_minimums(self, max_num_batched_tokens=1, max_num_seqs=1)
        check_range("refill_threshold", self.refill_threshold, at_least=0, at_most=1, fix="refill_threshold=0.125")

    def build(self, host: EngineContext) -> Engine:
        """See `EngineConfig`."""
        return host.sampler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            refill_threshold=self.refill_threshold,
            cuda_graphs=self.cuda_graphs,
        )


@dataclass(frozen=True)
class HFConfig:
    """transformers' `generate` on a replica of the model. Needs the memory of one more copy."""

    capabilities: ClassVar[Capabilities] = Capabilities(logprobs=True, weight_updates=True, routing=True)

    max_batch_tokens: int = 16_384
    """Tokens of prompts and responses per generation batch."""

    def __post_init__(self) -> None:
        check_minimums(self, max_batch_tokens=1)

    def build(self, host: EngineContext) -> Engine:
        """See `EngineConfig`."""
        return host.replica(max_batch_tokens=self.max_batch_tokens)


@dataclass(frozen=True)
class ServerConfig:
    """A server that speaks OpenAI's completions API, or several of them, among which requests are shared."""

    capabilities: ClassVar[Capabilities] = Capabilities(logprobs=True, weight_updates=False, seeds=False)

    url: str | list[str] | None
    """Address of the server (`http://localhost:8000`), or a list of them with the same model."""
    model: str | None = None
    """Name of the model on the server. null: its only model."""
    concurrency: int = 32
    """Maximum number of open requests per server."""
    timeout: float = 600.0
    """Seconds for one request."""
    retries: int = 4
    """Number of retries of a request if the server is busy or unavailable."""
    api_key_env: str | None = None
    """Environment variable with the API key. null: no key."""
    trust_logprobs: bool = False
    """Treat the log-probs of the server as those of the sampled distribution."""

    def __post_init__(self) -> None:
        check_minimums(self, concurrency=1, retries=0)
        self._check_urls()
        check_range("timeout", self.timeout, above=0, unit="s", fix="timeout=600")

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [self.url] if isinstance(self.url, str) else list(self.url or ())

    def _check_urls(self) -> None:
        urls = self.urls
        if not urls:
            raise ConfigError(
                "url=[] must contain at least one server",
                code="empty_value",
                keys=("url",),
                fix="url=http://localhost:8000",
            )
        with_scheme = [url if url.startswith(("http://", "https://")) else f"http://{url}" for url in urls]
        unique = list(dict.fromkeys(url.rstrip("/") for url in with_scheme))
        fix = f"url={unique[0]}" if isinstance(self.url, str) else f"url=[{','.join(unique)}]"
        if with_scheme != urls:
            raise ConfigError(
                f"url={self.url!r} must start with http:// or https://", code="invalid_value", keys=("url",), fix=fix
            )
        if len(unique) < len(urls):
            raise ConfigError(f"url={self.url!r} contains a server twice", code="invalid_value", keys=("url",), fix=fix)

    def build(self, host: EngineContext) -> Engine:
        """See `EngineConfig`. One process speaks to the servers."""
        return host.on_first_rank(lambda: self._connected(host, self.urls))

    def _connected(self, host: EngineContext, urls: Sequence[str]) -> Engine:
        from automodel_cli.rollout.engines.servers.openai import OpenAIEngine
        from automodel_cli.rollout.engines.servers.server_pool import ServerPool

        engines = [
            OpenAIEngine(
                server,
                host.tokenizer,
                model=self.model,
                concurrency=self.concurrency,
                trust_logprobs=self.trust_logprobs,
                stop_token_ids=host.stop_token_ids,
            )
            for server in self.at(urls)
        ]
        return engines[0] if len(engines) == 1 else ServerPool(engines, concurrency=self.concurrency)

    def at(self, urls: Sequence[str]) -> list[Server]:
        """How each address is spoken to. Raises ConfigError when the environment has no such key."""
        from automodel_cli.rollout.http import Server

        key = None
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if key is None:
                raise ConfigError(
                    f"the environment variable {self.api_key_env} (api_key_env) is not set",
                    code="invalid_environment",
                    keys=("api_key_env",),
                    fix=f"export {self.api_key_env}=...",
                )
        setting, advice = self._where()
        return [Server(url, self.timeout, self.retries, api_key=key, setting=setting, advice=advice) for url in urls]

    def _where(self) -> tuple[str, str | None]:
        """`setting` and `advice` of `Server`."""
        return "rollout.engine.url", None


@dataclass(frozen=True)
class LiveServerConfig(ServerConfig):
    """Base config of servers with weight updates (vLLM and SGLang).

    `command` starts a server on the node of the first rank and stops it with the run. Its output is in
    `logs/rollout_server.log` of the run. It must respond at `url` within `start_timeout` seconds. null: you started
    the server.

    - `command` is a list, or text that is split into arguments. No shell runs it, so nothing is expanded.
    - The command line must allow it with `--trust command`.
    - `automodel submit --rollout-nodes` starts `servers` on separate nodes. `rollout.placement` selects the GPUs.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        logprobs=True, weight_updates=True, seeds=False, hub_names=True, in_flight_updates=True, routing=True
    )
    transports: ClassVar[tuple[str, ...]]
    """Valid values of `transport`."""
    untrusted: ClassVar[str]
    """Reason why trust_logprobs=false is not supported."""
    with_experts: ClassVar[str]
    """Command of a server that returns routed experts."""

    url: str | list[str] | None = None
    """Address of the running server, or a list of them. null: see `servers`."""
    servers: ManagedServers | None = None
    """Servers that the run starts, instead of `url`."""
    concurrency: int = 256
    """Maximum number of open requests per server."""
    weights_dir: str | None = None
    """Folder of the weights with `transport=files`. null: `rollout_weights` in the run folder."""
    address: str | None = None
    """Address of the first rank for the server. null: this host's name, or 127.0.0.1 for a local server."""
    port: int = 29_600
    """Free port on the first rank's host, for the weight transfer."""
    trust_logprobs: bool = True
    """Must be true: the update needs the server's log-probs."""
    command: str | list[str] | None = field(
        default=None, metadata=trust.executes_code(trust.COMMAND, "is a command that the run starts on this machine")
    )
    """Command that starts the server at `url`, as text or a list; needs `--trust command`. null: the server is
    running."""
    start_timeout: float = 900.0
    """Time limit in seconds for the first response of a started server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("start_timeout", self.start_timeout, above=0, unit="s", fix="start_timeout=900")
        if not self.trust_logprobs:
            raise ConfigError(
                f"trust_logprobs=false is not supported: {self.untrusted}",
                code="not_supported",
                keys=("trust_logprobs",),
                fix="trust_logprobs=true",
            )
        check_choice("transport", self.way, self.transports, fix="transport=files")
        if self.way != "files" and self.weights_dir is not None:
            raise ConfigError(
                f"weights_dir={self.weights_dir} has no effect with transport={self.way}",
                code="no_effect",
                keys=("weights_dir", "transport"),
                fix="transport=files",
            )
        if self.command is not None:
            program_arguments(self.command)
        if self.num_servers > 1:
            self._check_several()

    @property
    def way(self) -> str:
        """How weights travel: `transport`, whose values each node names."""
        raise NotImplementedError

    @property
    def num_servers(self) -> int:
        return len(self.urls) if self.servers is None else self.servers.num_servers

    def _check_urls(self) -> None:
        if (self.url is None) == (self.servers is None):
            given = "both are" if self.servers is not None else "none is"
            raise ConfigError(
                f"exactly one of url and servers must be set: {given} set",
                code="mutually_exclusive" if self.servers is not None else "missing_key",
                keys=("url", "servers"),
                fix="servers=null" if self.servers is not None else "url=http://localhost:8000",
            )
        if self.url is not None:
            super()._check_urls()
        elif self.command is not None:
            raise ConfigError(
                f"command={self.command!r} is not supported with servers, which have their own command",
                code="unsupported_combination",
                keys=("command", "servers"),
                fix="command=null",
            )

    def _where(self) -> tuple[str, str | None]:
        """See `ServerConfig`."""
        if self.servers is None:
            return super()._where()
        advice = "look into logs/rollout_server-*.log of the run; automodel resume RUN starts its servers anew"
        return "rollout.engine.servers", advice

    def _started(self, host: EngineContext) -> list[str]:
        """Start the servers of the run and return all addresses once they respond. Collective."""
        return self.urls if self.servers is None else host.start_servers(timeout=self.start_timeout)

    def check_params(self, params: SamplingParams) -> None:
        """Raise ConfigError for a distribution that the server does not support."""

    def _check_several(self) -> None:
        if self.command is not None:
            raise ConfigError(
                f"command={self.command!r} is not supported with {len(self.urls)} servers in url: it starts one server",
                code="unsupported_combination",
                keys=("command", "url"),
                fix="command=null",
            )

    def _engine(self, server: Server, host: EngineContext, transfer: Transfer) -> WeightUpdateMixin:
        raise NotImplementedError

    def _served(self, host: EngineContext, urls: Sequence[str], transfer: SharedTransfer | None = None) -> Engine:
        """Return the engine on the rank that talks to the servers. `transfer=None` sends weights by files."""
        from automodel_cli.rollout.engines.servers.colocated import SharedGPUs
        from automodel_cli.rollout.engines.servers.live_pool import LivePool
        from automodel_cli.rollout.weight_sync.transports import FileTransfer

        servers = self.at(urls)
        if self.command is not None:
            host.start_server(program_arguments(self.command), servers[0], timeout=self.start_timeout)
        folder = host.run_dir / "rollout_weights" if self.weights_dir is None else Path(self.weights_dir)
        by = transfer or FileTransfer(folder)
        engines = [self._engine(server, host, by) for server in servers]
        engine = engines[0] if len(engines) == 1 else LivePool(engines, by, concurrency=self.concurrency)
        return SharedGPUs(engine, engines) if host.shares_gpus else engine


@dataclass(frozen=True)
class VLLMConfig(LiveServerConfig):
    """vLLM server (0.31 or later) with weight updates after each step. docs/rollout.md has its command line.

    Values of `transport`:

    - `files`: the run writes weights to `weights_dir`, and the server reads the same path. Works with any number of
      nodes. null: `rollout_weights` in the run directory.
    - `nccl`: from GPU to GPU. Needs the package vllm on the first rank, and a server started with
      `--weight-transfer-config '{"backend": "nccl"}'`. `address` is the machine of the first rank as seen by the
      server (null: this host name, or 127.0.0.1 for a local server). `port` is a free port on it.
    - `ipc`: workers of the server read the memory of ranks on the same GPUs (`rollout.placement=colocated`, one node).
      Needs the package vllm and its backend `ipc`.

    `nccl` and `ipc` have not yet run on GPUs. For `command` see `LiveServerConfig`.
    """

    transports: ClassVar[tuple[str, ...]] = ("files", "nccl", "ipc")
    untrusted: ClassVar[str] = "start vLLM with --logprobs-mode processed_logprobs"
    with_experts: ClassVar[str] = VLLM_WITH_EXPERTS

    servers: VLLMServers | None = None
    """vLLM servers that the run starts, instead of `url`."""
    transport: Literal["files", "nccl", "ipc"] = "nccl"
    """How weights reach vLLM: `files`, `nccl` (GPU to GPU) or `ipc` (same GPUs, `rollout.placement=colocated`)."""

    @property
    def way(self) -> str:
        return self.transport

    def build(self, host: EngineContext) -> Engine:
        """See `EngineConfig`. Checks this machine before a server is started."""
        if self.transport != "files":
            from automodel_cli.rollout.weight_sync.transports import check_gpus

            check_gpus(self.transport, host.device.type)
        urls = self._started(host)
        if self.transport == "files":
            return host.on_first_rank(lambda: self._served(host, urls))
        from automodel_cli.rollout.weight_sync.transports import FactoryTransfer, ipc_init, nccl_init

        if self.transport == "nccl":
            address = self.address or address_for(urls[0])
            return host.on_first_rank(lambda: self._served(host, urls, FactoryTransfer(nccl_init(address, self.port))))
        shared = FactoryTransfer(ipc_init())
        return host.on_first_rank(lambda: self._served(host, urls, shared), joins=shared.join)

    def _engine(self, server: Server, host: EngineContext, transfer: Transfer) -> WeightUpdateMixin:
        from automodel_cli.rollout.engines.servers.vllm import VLLMEngine

        return VLLMEngine(
            server,
            host.tokenizer,
            transfer,
            model=self.model,
            concurrency=self.concurrency,
            stop_token_ids=host.stop_token_ids,
        )


def address_for(url: str) -> str:
    """This machine, as the server at `url` sees it."""
    return "127.0.0.1" if urlsplit(url).hostname in ("127.0.0.1", "localhost") else socket.gethostname()


def program_arguments(command: str | list[str], key: str = "command") -> list[str]:
    """Return the program and its arguments. `key` is the config key of `command`.
    Raise ConfigError for shell syntax."""
    if not isinstance(command, str):
        words = command
    else:
        try:
            words = shlex.split(command)
            lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            operators = [token for token in lexer if token and set(token) <= set("();<>|&")]
        except ValueError as error:  # an open quote
            raise ConfigError(
                f"{key}={command!r} cannot be split into arguments: {error}", code="invalid_value", keys=(key,)
            ) from error
        shell_syntax = operators or re.findall(r"`|\$[({A-Za-z_]", command)
        if shell_syntax or (words and re.match(r"[A-Za-z_]\w*=", words[0])):
            raise ConfigError(
                f"{key}={command!r} contains shell syntax ({(shell_syntax or words)[0]}), but the command runs "
                "without a shell",
                code="not_supported",
                keys=(key,),
                fix=f"{key}='{json.dumps(['bash', '-c', command])}'",
            )
    if not words or not words[0]:
        raise ConfigError(f"{key}={command!r} contains no program", code="empty_value", keys=(key,), fix=f"{key}=null")
    return list(words)
