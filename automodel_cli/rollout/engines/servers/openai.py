"""Client of OpenAI's completions API: vLLM, SGLang, `transformers serve` and others.

Servers differ in features. One request with one token detects token ids in (`prompt` as a list), token ids out
(`return_token_ids`, `choices[].token_ids`) and log-probs (`logprobs`, `choices[].logprobs.token_logprobs`). A server
without them can be used for evaluation. `capabilities` show this, and training is rejected.

Every request contains all sampling parameters. Otherwise vLLM uses defaults of the model's generation_config.json, for
example top_k=20, which would truncate the distribution of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.engines.live_update import VersionSpan
from automodel_cli.rollout.engines.servers.http_engine import HTTPEngine
from automodel_cli.rollout.engines.servers.launch_commands import VLLM_WITH_EXPERTS
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.routed_experts import decode_experts, from_text
from automodel_cli.rollout.types import Completion, FinishReason, SamplingParams, WeightStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PATH = "/v1/completions"


class TokenLogprob(TypedDict):
    """Entry of the tokens API of vLLM."""

    logprob: float


class Logprobs(TypedDict, total=False):
    """Log-probs of the generated tokens: `token_logprobs`, or `content` in the tokens API of vLLM."""

    token_logprobs: list[float] | None
    content: list[TokenLogprob]


class Choice(TypedDict, total=False):
    """An entry of `choices` in a response. Which keys exist depends on the server."""

    text: str
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    logprobs: Logprobs | None
    finish_reason: str | None
    routed_experts: str | None
    weight_versions: list[VersionSpan] | None


class OpenAIEngine(HTTPEngine):
    """`HTTPEngine` of the completions API. `model=None` uses the only model of the server.

    Without token ids, prompts are sent as text, and completions are tokenized again (with the end-of-sequence token if
    they stopped). Whether log-probs are those of the sampled distribution (after temperature, top-k and top-p) depends
    on the server (`--logprobs-mode processed_logprobs` of vLLM). Therefore `trust_logprobs` must confirm it. Without,
    `logprobs` of completions are empty.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str | None = None,
        concurrency: int = 32,
        trust_logprobs: bool = False,
        stop_token_ids: Sequence[int] = (),
    ):
        super().__init__(server, tokenizer, concurrency=concurrency, stop_token_ids=stop_token_ids)
        self.model = model or self._only_model()
        self._tells_experts = False
        self._token_ids, self._logprobs = self._probe()
        self.capabilities = Capabilities(
            logprobs=self._logprobs and trust_logprobs,
            weight_updates=False,
            token_ids=self._token_ids,
            seeds=False,
            at_once=concurrency,
            routing=self._tells_experts,
        )

    def check_params(self, params: SamplingParams) -> None:
        """See `HTTPEngine`. OpenAI's API has no top_k, and a server without token ids may ignore it."""
        if params.top_k and not self._token_ids:
            raise ConfigError(
                f"top_k={params.top_k} is not supported, because OpenAI's API has no top_k and {self.server.url} may "
                "ignore it",
                code="not_supported",
                keys=("top_k",),
                fix="top_k=0",
            )

    def has_given_weights(self) -> bool:
        """They are fixed."""
        return True

    def update_weights(self, stream: WeightStream) -> None:
        """Not supported: the API has no such call."""
        raise RunError(
            f"{self.server.url} does not support weight updates, which OpenAI's API lacks",
            code="not_supported",
            keys=("rollout.engine",),
            fix="rollout=sampler",
        )

    def _completed(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """See `HTTPEngine`."""
        version = self.weight_version
        choice, reason = self._finished(self._body(prompt, params, seed))
        tokens = choice.get("token_ids") if self._token_ids else self._tokens_of(choice.get("text") or "", reason)
        if tokens is None:
            raise RunError(
                f"{self.server.url} returned no token ids, although it did before",
                code="invalid_response",
                keys=("rollout.engine.url",),
            )
        logprobs = _token_logprobs(choice) if self.capabilities.logprobs else []
        if self.capabilities.logprobs and len(logprobs) != len(tokens):
            raise RunError(
                f"{self.server.url} returned {len(tokens)} tokens but {len(logprobs)} log-probs",
                code="invalid_response",
                keys=("rollout.engine.url",),
            )
        read = choice.get("prompt_token_ids")  # if the server returns it
        other = None if read is None or list(read) == list(prompt) else list(read)
        experts = None
        if params.routing:
            text = choice.get("routed_experts")
            experts = decode_experts(text, len(prompt) + len(tokens) - 1, from_text, start=VLLM_WITH_EXPERTS)
        oldest, several = self._drawn_by(choice, len(tokens), version)
        return Completion(list(tokens), logprobs, reason, oldest, other, several, experts)

    def _finished(self, body: dict[str, object]) -> tuple[Choice, FinishReason]:
        """A choice that came to its end, with its reason."""

        def ask() -> tuple[Choice, str | None]:
            choice = self._answer(body)
            return choice, choice.get("finish_reason")

        return self.complete_answer(ask)

    def _answer(self, body: dict[str, object]) -> Choice:
        """Return the choice of the server for the request `body`."""
        return self._choice(self.server.post(_PATH, body))

    def _drawn_by(self, choice: Choice, num_tokens: int, asked: int) -> tuple[int, list[int] | None]:
        """Return the oldest weight version that sampled a token of `choice`, and the version of each token if there
        are several. `asked` is the version when the request was sent."""
        return asked, None

    def _body(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "prompt": list(prompt) if self._token_ids else self.tokenizer.decode(list(prompt)),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed % 2**31,
        }
        if self._token_ids:  # a server with this extension has the others too
            body |= {
                "return_token_ids": True,
                "top_k": params.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "min_tokens": 0,
                "ignore_eos": False,
                "stop_token_ids": self.stop_token_ids,
            }
        if self._logprobs:
            body["logprobs"] = 0  # of the sampled token only
        return body

    def _tokens_of(self, text: str, reason: FinishReason) -> list[int]:
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        return [*ids, end] if reason == "stop" and end is not None and ids[-1:] != [end] else ids

    def _probe(self) -> tuple[bool, bool]:
        """Return whether the server accepts and returns token ids, and returns log-probs. Sends one token in two
        forms."""
        prompt = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        base = {"model": self.model, "max_tokens": 1, "temperature": 0.0}
        try:
            full = {**base, "prompt": prompt, "return_token_ids": True, "logprobs": 0}
            choice = self._choice(self.server.post(_PATH, full))
            if choice.get("token_ids") is not None:
                self._tells_experts = choice.get("routed_experts") is not None
                return True, bool(_token_logprobs(choice))
        except RunError:  # Some servers reject unknown fields. The plain request shows whether they work at all.
            pass
        self._choice(self.server.post(_PATH, {**base, "prompt": self.tokenizer.decode(prompt)}))
        return False, False

    def _choice(self, answer: object) -> Choice:
        match answer:
            case {"choices": [first, *_]}:
                choice: Choice = first
                return choice
        raise RunError(
            f"{self.server.url}{_PATH} returned no choice: {str(answer)[:300]}",
            code="invalid_response",
            keys=("rollout.engine.url",),
        )

    def _only_model(self) -> str:
        names = [entry["id"] for entry in (self.server.get("/v1/models") or {}).get("data", [])]
        if len(names) != 1:
            raise ConfigError(
                f"{self.server.url} serves {len(names)} models ({', '.join(names[:5])}). Set the name of one",
                code="ambiguous" if names else "server_mismatch",
                keys=("rollout.engine.model",),
                fix=f"rollout.engine.model={names[0] if names else '<name>'}",
            )
        name: str = names[0]
        return name


def _token_logprobs(choice: Choice) -> list[float]:
    logprobs: Logprobs = choice.get("logprobs") or {}
    return [float(value) for value in logprobs.get("token_logprobs") or []]
