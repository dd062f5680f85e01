"""vLLM as a server: its completions API, and weight updates through its public endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

Its versions, what of this has been run and on what: docs/rollout.md. Nothing of vLLM is patched, and its package is
imported only to send weights over NCCL (extra `vllm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.engine import Capabilities, Completion, SamplingParams
from automodel_cli.rollout.servers.http import Server, ServerError
from automodel_cli.rollout.servers.live_weights import LiveWeights
from automodel_cli.rollout.servers.openai import OpenAIEngine, routed_experts
from automodel_cli.rollout.servers.release import check_release
from automodel_cli.rollout.servers.transfer import Transfer, once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 31)
"""The oldest release whose calls are these."""
_GENERATE = "/inference/v1/generate"


class VLLMEngine(LiveWeights, OpenAIEngine):
    """An `OpenAIEngine` whose weights can be replaced.

    Raises ConfigError for a server that is no vLLM, or too old a one, or was started without what training needs.
    """

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
        start = "vllm serve MODEL --logprobs-mode processed_logprobs"
        self.version = str(check_release(server, "/version", "vLLM", OLDEST, start=start)["version"])
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
                f"{server.url} does not answer with token ids and log-probs",
                keys=("rollout.engine.url",),
                fix=start,
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
        self._tells_versions = self._probe_versions()
        _check_dev_mode(server)

    def complete(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """See `OpenAIEngine.complete`. A server with `--enable-scale-out` (0.32) says of each token which weights drew
        it; of another all count as drawn by those that it had when the request was sent, the oldest that can be."""
        if not self._tells_versions:
            return super().complete(prompt, params, seed)
        asked = self.weight_version
        choice, reason = self._finished(self._tokens_body(self._body(prompt, params, seed)), _GENERATE)
        tokens = list(choice["token_ids"])
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        if len(logprobs) != len(tokens):
            raise RunError(f"{self.server.url} gave {len(tokens)} tokens and {len(logprobs)} log-probs")
        oldest, several = self.versions_in(choice["weight_versions"], len(tokens), asked)
        experts = routed_experts(choice, len(prompt) + len(tokens) - 1) if params.routing else None
        return Completion(tokens, logprobs, reason, oldest, token_versions=several, routed_experts=experts)

    def pause(self) -> None:
        self.server.post("/pause?mode=keep")

    def go_on(self, *, retries: int | None = None) -> None:
        self.server.request("POST", "/resume", {}, retries=retries)

    def forget(self) -> None:
        """See `LiveWeights`."""
        self.server.post("/reset_prefix_cache?reset_running_requests=true")

    def load_files(self, folder: Path) -> None:
        """See `LiveWeights`."""
        once(self.server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def num_ranks(self) -> int:
        """See `LiveWeights`."""
        return int(self.server.get("/get_world_size")["world_size"])

    def name_weights(self, name: str) -> None:
        self.server.post("/update_weight_version", {"new_version": name})

    def weights_name(self) -> str | None:
        """See `LiveWeights`."""
        return (self.server.get("/weight_info") or {}).get("weight_version")

    def sleep(self, *, weights_follow: bool) -> None:
        """Level 2 drops the weights, level 1 keeps them in the machine's memory."""
        once(self.server, f"/sleep?level={2 if weights_follow else 1}", {})

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """See `LiveWeights`."""
        once(self.server, f"/wake_up?tags={what}", {})

    @staticmethod
    def _tokens_body(body: dict[str, Any]) -> dict[str, Any]:
        """What the completions API is asked, for the API that says which weights drew a token."""
        elsewhere = ("model", "prompt", "return_token_ids")
        params = {name: value for name, value in body.items() if name not in elsewhere}
        return {
            "model": body["model"],
            "token_ids": body["prompt"],
            "sampling_params": {**params, "detokenize": False},
        }

    def _probe_versions(self) -> bool:
        """Whether that API is open and says so: from one token."""
        prompt = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        body = self._tokens_body(self._body(prompt, SamplingParams(1, temperature=0.0), 0))
        try:
            return self._choice(self.server.post(_GENERATE, body)).get("weight_versions") is not None
        except ServerError as error:
            if error.is_busy_or_gone:
                raise
            return False


def _check_dev_mode(server: Server) -> None:
    try:
        server.get("/weight_info")
    except ServerError as error:
        if error.status != 404:
            raise
        raise ConfigError(
            f"{server.url} has no /weight_info, so its weights cannot be replaced: it was started without "
            "VLLM_SERVER_DEV_MODE=1",
            keys=("rollout.engine.url",),
            fix="export VLLM_SERVER_DEV_MODE=1",
        ) from error
