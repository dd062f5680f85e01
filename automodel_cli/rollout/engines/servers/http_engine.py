"""What engines behind HTTP have in common: requests side by side, answers that came to their end."""

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
    """One request for each prompt, `concurrency` at a time; batching is the server's.

    `stop_token_ids` end a completion besides the server's own end-of-sequence token.
    """

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
        """Updates of the weights, and how often an update found that the server had lost those before it."""
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="requests")
        self._open = OpenRequests()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `Engine.generate`; seeds are passed on, and what they fix is the server's affair.

        Raises ConfigError for what the server cannot be asked, RunError for the server.
        """
        self.check_params(params)
        seeds = resolve_seeds(prompts, params, seeds)
        # one line for all calls: rollouts that overlap share the limit, and the older one's requests go first
        asked = [
            self._threads.submit(self.complete, prompt, params, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        try:
            return [answer.result() for answer in asked]
        finally:
            for answer in asked:
                answer.cancel()

    def complete(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """The answer to one request. Raises ServerError, and RunError for an answer that cannot be used."""
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
        """Raise ConfigError for what the server cannot be asked."""

    @abstractmethod
    def has_given_weights(self) -> bool:
        """Whether the server has the weights that it was given last."""

    @abstractmethod
    def update_weights(self, stream: WeightStream) -> None:
        """See `Engine.update_weights`."""

    def whole(self, ask: Callable[[], tuple[T, str | None]]) -> tuple[T, FinishReason]:
        """What `ask` gives, with its reason to finish, once it came to its end. A completion that the server broke off
        (`abort`) is no sample of the policy: it is asked for again, as often as a request that fails."""
        for _ in range(self.server.retries + 1):
            answer, said = ask()
            reason = _FINISHED.get(said)
            if reason is not None:
                return answer, reason
        raise ServerError(
            f"{self.server.url} ended a completion with {said!r} ({self.server.retries + 1} tries). "
            "Expected: stop or length",
            code="invalid_response",
            keys=("rollout.engine.url",),
            fix="look into the server's log; then automodel resume RUN",
        )
