"""vLLM as a server: its completions API, and weight updates through its public endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

Its versions, what of this has been run and on what: docs/rollout.md. Nothing of vLLM is patched, and its package is
imported only to send weights over NCCL (extra `vllm`).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.engine import Capabilities, Completion, SamplingParams, WeightStream
from automodel_cli.rollout.http import Server, ServerError
from automodel_cli.rollout.openai import OpenAIEngine
from automodel_cli.rollout.transfer import Transfer, read_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 31)
"""The oldest release whose calls are these."""


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
            logprobs=True, weight_updates=True, seeds=False, hub_names=True, at_once=concurrency
        )
        self._transfer = transfer
        self._given: str | None = None
        _check_dev_mode(server)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `OpenAIEngine.generate`. Raises RunError where the server has other weights than it was given last: it
        was started anew, or another run has replaced them."""
        completions = super().generate(prompts, params, seeds)
        self._check_weights()
        return completions

    def update_weights(self, stream: WeightStream) -> None:
        """Replace the server's weights; what is being generated goes on with the new ones.

        The server resumes even when a transfer fails; that raises RunError, and its weights are then a mixture. A
        transfer that does not end within the server's time limit, or whose server is gone, is an error too.
        """
        self._transfer.send(self.server, iter(stream), self._paused)
        self.weight_version += 1

    def read_weights(self, folder: Path) -> None:
        """`update_weights` from the files of `FileTransfer.written`. Raises ServerError."""
        read_files(self.server, folder, self._paused)
        self.weight_version += 1

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """The server does not generate in here, and forgets afterwards what it had computed with the old weights."""
        self.server.post("/pause?mode=keep")
        try:
            yield
            self.server.post("/reset_prefix_cache")
            given = uuid.uuid4().hex
            self.server.post("/update_weight_version", {"new_version": given})
            self._given = given
        except BaseException:
            with suppress(RunError):  # a server that is gone; what happened first says more
                self.server.request("POST", "/resume", {}, retries=0)
            raise
        self.server.post("/resume")

    def has_given_weights(self) -> bool:
        """A server that was restarted answers again, with the weights it was started with."""
        if self._given is None:
            return True
        found = (self.server.get("/weight_info") or {}).get("weight_version")
        return bool(found == self._given)

    def _check_weights(self) -> None:
        if not self.has_given_weights():
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
