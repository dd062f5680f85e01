"""Config nodes of the engines: the `rollout` section of a recipe that generates. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from automodel_cli.rollout.http import Server


@dataclass(frozen=True)
class SamplerConfig:
    """Our own sampler on the trained weights: no copy of the model, any layout.

    `num_slots` sequences decode together on each data-parallel rank; the cache holds that many times the longest.
    `prefill_tokens` bounds the prompts of one forward, `refill_share` is the share of slots that must be free before
    new prompts start.
    """

    num_slots: int = 32
    prefill_tokens: int = 8192
    refill_share: float = 0.125

    def __post_init__(self) -> None:
        _at_least(self, num_slots=1, prefill_tokens=1)
        if not 0 <= self.refill_share <= 1:
            raise ConfigError(
                f"refill_share={self.refill_share} must be from 0 to 1",
                keys=("refill_share",),
                fix="refill_share=0.125",
            )


@dataclass(frozen=True)
class HFConfig:
    """The library's own `generate` on a replica of the model, which needs the memory of one more copy."""

    max_batch_tokens: int = 16_384

    def __post_init__(self) -> None:
        _at_least(self, max_batch_tokens=1)


@dataclass(frozen=True)
class ServerConfig:
    """A server that speaks OpenAI's completions API, at `url` (`http://localhost:8000`).

    `model` is its name there, null where the server has only one. `timeout` seconds for one request; a request that
    finds the server busy or gone is sent again `retries` times. `api_key_env` names the environment variable with the
    key. `trust_logprobs`: the server's log-probs are those of the distribution sampled from.
    """

    url: str
    model: str | None = None
    concurrency: int = 32
    timeout: float = 600.0
    retries: int = 4
    api_key_env: str | None = None
    trust_logprobs: bool = False

    def __post_init__(self) -> None:
        _at_least(self, concurrency=1, retries=0)
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"url={self.url!r} has no http:// or https://", keys=("url",), fix=f"url=http://{self.url}"
            )
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout} s must be above 0", keys=("timeout",), fix="timeout=600")

    def server(self) -> Server:
        """Raises ConfigError when the environment has no such key."""
        from automodel_cli.rollout.http import Server

        key = None
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if key is None:
                raise ConfigError(
                    f"api_key_env={self.api_key_env}: the environment has no such variable",
                    keys=("api_key_env",),
                    fix=f"export {self.api_key_env}=...",
                )
        return Server(self.url, timeout=self.timeout, retries=self.retries, api_key=key)


@dataclass(frozen=True)
class VLLMConfig(ServerConfig):
    """A vLLM server whose weights are replaced over NCCL. `address` is this machine as the server sees it, `port` a
    free one on it. Never run against vLLM: see `rollout/vllm.py`.

    `command` starts the server with the run, on the machine of the first rank, and ends it with the run; its output
    goes to `logs/rollout_server.log` in the run's folder. It must answer at `url` within `start_timeout` seconds. Null:
    you have started it.
    """

    concurrency: int = 256
    address: str = "127.0.0.1"
    port: int = 29_600
    trust_logprobs: bool = True
    command: str | None = None
    start_timeout: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.start_timeout > 0:
            raise ConfigError(
                f"start_timeout={self.start_timeout} s must be above 0",
                keys=("start_timeout",),
                fix="start_timeout=900",
            )
        if not self.trust_logprobs:
            raise ConfigError(
                "trust_logprobs=false: start vLLM with --logprobs-mode processed_logprobs",
                keys=("trust_logprobs",),
                fix="trust_logprobs=true",
            )


def _at_least(node: object, **least: int) -> None:
    for name, value in least.items():
        if getattr(node, name) < value:
            raise ConfigError(
                f"{name}={getattr(node, name)} must be at least {value}", keys=(name,), fix=f"{name}={value}"
            )
