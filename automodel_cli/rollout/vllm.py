"""vLLM as a server: its completions API, and weight updates through its public endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

Its versions, what of this has been run and on what: docs/rollout.md. Nothing of vLLM is patched, and its package is
imported only to send weights over NCCL (extra `vllm`).
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.engine import Capabilities, Completion, SamplingParams, WeightStream
from automodel_cli.rollout.http import Server, ServerError
from automodel_cli.rollout.openai import OpenAIEngine, routed_experts
from automodel_cli.rollout.transfer import Transfer, read_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 31)
"""The oldest release whose calls are these."""
_GENERATE = "/inference/v1/generate"


class VLLMEngine(OpenAIEngine):
    """An `OpenAIEngine` whose weights can be replaced. One process speaks to the server (rank 0 of the run).

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
        self.version = check_version(server)
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
                fix="vllm serve MODEL --logprobs-mode processed_logprobs",
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
        self._transfer = transfer
        self._given: str | None = None
        self._versions: dict[str, int] = {}
        """Which of our versions the server's names for its weights are."""
        self._replacing = threading.Lock()
        self._tells_versions = self._probe_versions()
        _check_dev_mode(server)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `OpenAIEngine.generate`. Raises RunError where the server has other weights than it was given last: it
        was started anew, or another run has replaced them."""
        losses = self.num_losses
        completions = super().generate(prompts, params, seeds)
        self._check_weights(losses)
        return completions

    def complete(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """See `OpenAIEngine.complete`. A server with `--enable-scale-out` (0.32) says of each token which weights drew
        it; of another all count as drawn by those that it had when the request was sent, the oldest that can be."""
        if not self._tells_versions:
            return super().complete(prompt, params, seed)
        oldest = self.weight_version
        choice, reason = self._finished(self._tokens_body(self._body(prompt, params, seed)), _GENERATE)
        tokens = list(choice["token_ids"])
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        if len(logprobs) != len(tokens):
            raise RunError(f"{self.server.url} gave {len(tokens)} tokens and {len(logprobs)} log-probs")
        versions = [oldest] * len(tokens)
        for span in choice["weight_versions"] or ():
            drawn = slice(span["start"], span["end"])
            versions[drawn] = [self._versions.get(span["version"], oldest)] * len(versions[drawn])
        several = versions if len(set(versions)) > 1 else None
        experts = routed_experts(choice, len(prompt) + len(tokens) - 1) if params.routing else None
        version = min(versions, default=oldest)
        return Completion(tokens, logprobs, reason, version, token_versions=several, routed_experts=experts)

    def update_weights(self, stream: WeightStream) -> None:
        """Replace the server's weights; what is being generated goes on with the new ones.

        The server resumes even when a transfer fails; that raises RunError, and its weights are then a mixture. A
        transfer that does not end within the server's time limit, or whose server is gone, is an error too.
        """
        version = self.weight_version + 1
        self._transfer.send(self.server, iter(stream), partial(self._paused, version))
        self.weight_version = version

    def read_weights(self, folder: Path, version: int) -> None:
        """`update_weights` to this version from the files of `FileTransfer.written`. Raises ServerError."""
        read_files(self.server, folder, partial(self._paused, version))
        self.weight_version = version

    @contextmanager
    def _paused(self, version: int) -> Iterator[None]:
        """The server does not generate in here, and forgets afterwards what it had computed with the old weights: keys
        and values of what it is generating too, which it computes again with the new ones."""
        if not self.has_given_weights():
            self.num_losses += 1
        with self._replacing, self._stopped():
            yield
            self.server.post("/reset_prefix_cache?reset_running_requests=true")
            given = uuid.uuid4().hex
            self._versions[given] = version
            self.server.post("/update_weight_version", {"new_version": given})
            self._given = given

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self.server.post("/pause?mode=keep")
        try:
            yield
        except BaseException:
            with suppress(RunError):  # a server that is gone; what happened first says more
                self.server.request("POST", "/resume", {}, retries=0)
            raise
        self.server.post("/resume")

    def has_given_weights(self) -> bool:
        """A server that was restarted answers again, with the weights it was started with."""
        with self._replacing:
            if self._given is None:
                return True
            found = (self.server.get("/weight_info") or {}).get("weight_version")
            return bool(found == self._given)

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

    def _check_weights(self, losses: int) -> None:
        if self.num_losses != losses or not self.has_given_weights():
            raise RunError(
                f"{self.server.url} no longer has the weights that this run gave it: the server was started anew, or "
                "another run uses it. The samples of this step are dropped",
                keys=("rollout.engine.url",),
                fix="automodel resume RUN",
            )


def check_version(server: Server) -> str:
    """The release that the server reports. Raises ConfigError for one before `OLDEST`, and for another kind of server.

    A release after those that were tested is let through: what it has is found out by using it.
    """
    try:
        answer = server.get("/version")
    except ServerError as error:
        if error.status != 404:
            raise
        answer = None
    if not isinstance(answer, dict) or "version" not in answer:
        raise ConfigError(
            f"{server.url} has no /version, so it is no vLLM server",
            keys=("rollout.engine.url",),
            fix="vllm serve MODEL --logprobs-mode processed_logprobs",
        )
    version = str(answer["version"])
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return version  # a build from source may call itself anything
    oldest = f"{OLDEST[0]}.{OLDEST[1]}"
    raise ConfigError(
        f"{server.url} is vLLM {version}, whose weight updates are others than those of {oldest} and later",
        keys=("rollout.engine.url",),
        fix=f"pip install 'vllm>={oldest}'",
    )


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
