"""Base class of engines behind HTTP: concurrent requests, and retries of aborted completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from automodel_cli.rollout.engines.base import Capabilities, resolve_seeds
from automodel_cli.rollout.engines.servers.inflight_requests import OpenRequests
from automodel_cli.rollout.http import Server, ServerError
from automodel_cli.rollout.types import Completion, FinishReason, SamplingParams, WeightStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_FINISHED: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class HTTPEngine(ABC):
    """Send one request per prompt, up to `concurrency` concurrently. The server batches them. `stop_token_ids` end a
    completion in addition to the server's end-of-sequence token."""

    capabilities: Capabilities

    def __init__(
        self,
        server: Server,
        tokenizer: PreTrainedTokenizerBase,
        *,
        concurrency: int,
        stop_token_ids: Sequence[int],
    ):
        self.server, self.tokenizer, self.concurrency = server, tokenizer, concurrency
        self.stop_token_ids = list(stop_token_ids)
        self.weight_version = self.num_losses = 0
        """Number of weight updates, and how often an update found that the server had lost the previous weights."""
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="requests")
        self._open = OpenRequests()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `Engine.generate`. Seeds are passed to the server, without a guarantee of determinism. Raises
        ConfigError for unsupported parameters, and RunError for errors of the server."""
        self.check_params(params)
        seeds = resolve_seeds(prompts, params, seeds)
        # one line for all calls: rollouts that overlap share the limit, and the older one's requests go first
        requests = [
            self._threads.submit(self.complete, prompt, params, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        try:
            return [answer.result() for answer in requests]
        finally:
            for answer in requests:
                answer.cancel()

    def complete(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """Return the answer to one request. Raises ServerError, and RunError for an invalid answer."""
        with self._open.one_more():
            return self._completed(prompt, params, seed)

    def idle_fraction(self) -> float:
        """See `OpenRequests`."""
        return self._open.idle_fraction()

    @abstractmethod
    def _completed(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """See `complete`."""

    @abstractmethod
    def check_params(self, params: SamplingParams) -> None:
        """Raise ConfigError for parameters that the server does not support."""

    @abstractmethod
    def has_given_weights(self) -> bool:
        """Return whether the server has the weights of the last update."""

    @abstractmethod
    def update_weights(self, stream: WeightStream) -> None:
        """See `Engine.update_weights`."""

    def complete_answer(self, ask: Callable[[], tuple[T, str | None]]) -> tuple[T, FinishReason]:
        """Return the value of `ask` and its finish reason. A completion that the server aborted (`abort`) is not a
        sample of the policy. It is requested again, as often as a failed request."""
        for _ in range(self.server.retries + 1):
            answer, finish_reason = ask()
            reason = _FINISHED.get(finish_reason)
            if reason is not None:
                return answer, reason
        raise ServerError(
            f"{self.server.url} ended a completion with {finish_reason!r} ({self.server.retries + 1} tries). "
            "Expected: stop or length",
            code="invalid_response",
            keys=("rollout.engine.url",),
            fix="look into the server's log; then automodel resume RUN",
        )
