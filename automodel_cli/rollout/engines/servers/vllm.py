"""Client of vLLM: its completions API, and weight updates through public endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

docs/rollout.md lists tested versions and hardware. vLLM is not patched. Its package is imported only to send weights
over NCCL (extra `vllm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.engines.live_update import WeightUpdateMixin
from automodel_cli.rollout.engines.servers.launch_commands import VLLM
from automodel_cli.rollout.engines.servers.openai import Choice, Logprobs, OpenAIEngine
from automodel_cli.rollout.engines.servers.version_check import check_release
from automodel_cli.rollout.http import Server, ServerError
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.rollout.weight_sync.transports import Transfer
from automodel_cli.rollout.weight_sync.update_requests import once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 31)
"""The oldest release whose calls are these."""
_GENERATE = "/inference/v1/generate"


class VLLMEngine(WeightUpdateMixin, OpenAIEngine):
    """`OpenAIEngine` with weight updates. Raises ConfigError for another server, an old version, or
    missing features."""

    def __init__(
        self,
        server: Server,
        tokenizer: PreTrainedTokenizerBase,
        transfer: Transfer,
        *,
        model: str | None = None,
        concurrency: int = 256,
        stop_token_ids: Sequence[int] = (),
    ):
        self.version = str(check_release(server, "/version", "vLLM", OLDEST, start=VLLM)["version"])
        super().__init__(
            server,
            tokenizer,
            model=model,
            concurrency=concurrency,
            trust_logprobs=True,
            stop_token_ids=stop_token_ids,
        )
        if not (self.capabilities.token_ids and self.capabilities.logprobs):
            raise ConfigError(
                f"{server.url} does not return token ids and log-probs",
                code="server_mismatch",
                keys=("rollout.engine.url",),
                fix=VLLM,
            )
        self.capabilities = Capabilities(
            logprobs=True,
            weight_updates=True,
            seeds=False,
            hub_names=True,
            at_once=concurrency,
            in_flight_updates=True,
            routing=self._tells_experts,
        )
        self.receive_by(transfer)
        self._asks_by_tokens = self._probe_versions()
        _check_dev_mode(server)

    def pause(self) -> None:
        self.server.post("/pause?mode=keep")

    def go_on(self, *, retries: int | None = None) -> None:
        self.server.request("POST", "/resume", {}, retries=retries)

    def forget(self) -> None:
        """See `WeightUpdateMixin`."""
        self.server.post("/reset_prefix_cache?reset_running_requests=true")

    def load_files(self, folder: Path) -> None:
        """See `WeightUpdateMixin`."""
        once(self.server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def num_ranks(self) -> int:
        """See `WeightUpdateMixin`."""
        return int(self.server.get("/get_world_size")["world_size"])

    def name_weights(self, name: str) -> None:
        self.server.post("/update_weight_version", {"new_version": name})

    def weights_name(self) -> str | None:
        """See `WeightUpdateMixin`."""
        return (self.server.get("/weight_info") or {}).get("weight_version")

    def sleep(self, *, weights_follow: bool) -> None:
        """Level 2 drops the weights, level 1 keeps them in the machine's memory."""
        once(self.server, f"/sleep?level={2 if weights_follow else 1}", {})

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """See `WeightUpdateMixin`."""
        once(self.server, f"/wake_up?tags={what}", {})

    def _body(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> dict[str, object]:
        return {**super()._body(prompt, params, seed), "return_weight_versions": True}  # since 0.33, ignored before

    def _answer(self, body: dict[str, object]) -> Choice:
        """See `OpenAIEngine._answer`. Converts answers of the tokens API to the form of the completions API."""
        if not self._asks_by_tokens:
            return super()._answer(body)
        choice = self._choice(self.server.post(_GENERATE, _tokens_body(body)))
        logprobs: Logprobs = choice.get("logprobs") or {}
        return {**choice, "logprobs": {"token_logprobs": [token["logprob"] for token in logprobs["content"]]}}

    def _drawn_by(self, choice: Choice, num_tokens: int, asked: int) -> tuple[int, list[int] | None]:
        """See `OpenAIEngine._drawn_by`. If the server does not return versions, all tokens count as sampled by the
        weights at the time of the request, the oldest possible ones."""
        return self.versions_in(choice.get("weight_versions"), num_tokens, asked)

    def _probe_versions(self) -> bool:
        """Return whether the tokens API is needed for weight versions of tokens. The completions API returns them
        since 0.33. In 0.32 only the tokens API does, which may be disabled (`--enable-scale-out`)."""
        prompt = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        body = self._body(prompt, SamplingParams(1, temperature=0.0), 0)
        if super()._answer(body).get("weight_versions") is not None:
            return False
        try:
            return self._choice(self.server.post(_GENERATE, _tokens_body(body))).get("weight_versions") is not None
        except ServerError as error:
            if error.is_busy_or_gone:
                raise
            return False


def _tokens_body(body: dict[str, object]) -> dict[str, object]:
    """Convert a request of the completions API to the tokens API of vLLM."""
    elsewhere = ("model", "prompt", "return_token_ids", "return_weight_versions")
    params = {name: value for name, value in body.items() if name not in elsewhere}
    return {"model": body["model"], "token_ids": body["prompt"], "sampling_params": {**params, "detokenize": False}}


def _check_dev_mode(server: Server) -> None:
    try:
        server.get("/weight_info")
    except ServerError as error:
        if error.status != 404:
            raise
        raise ConfigError(
            f"{server.url} does not support weight updates: it has no /weight_info, because it was "
            "started without VLLM_SERVER_DEV_MODE=1",
            code="server_mismatch",
            keys=("rollout.engine.url",),
            fix="export VLLM_SERVER_DEV_MODE=1",
        ) from error
