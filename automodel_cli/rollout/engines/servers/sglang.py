"""Client of SGLang: its `/generate` endpoint, and weight updates through public endpoints.

    python -m sglang.launch_server --model-path MODEL

docs/rollout.md lists tested versions and hardware. The package sglang is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.engines.live_update import VersionSpan, WeightUpdateMixin
from automodel_cli.rollout.engines.servers.launch_commands import SGLANG, SGLANG_WITH_EXPERTS
from automodel_cli.rollout.engines.servers.version_check import check_release
from automodel_cli.rollout.http import Server, ServerError
from automodel_cli.rollout.routed_experts import decode_experts, from_int32
from automodel_cli.rollout.types import Completion, SamplingParams
from automodel_cli.rollout.weight_sync.transports import Transfer
from automodel_cli.rollout.weight_sync.update_requests import once

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 5, 21)
"""The oldest release whose calls are these."""


class _Meta(TypedDict, total=False):
    """`meta_info` of a response. Entries of log-probs begin with the log-prob."""

    finish_reason: dict[str, str] | None
    output_token_logprobs: list[list[float]]
    output_token_sampling_logprobs: list[float]
    weight_versions: list[VersionSpan] | None
    routed_experts: str | None


class _Answer(TypedDict):
    """A response of `/generate`."""

    output_ids: list[int]
    prompt_token_ids: NotRequired[list[int] | None]
    meta_info: _Meta


class SGLangEngine(WeightUpdateMixin):
    """Generate with token ids, log-probs and the weight version of each token.

    SGLang returns log-probs after temperature and before top-k. With top-k, the sampling mask is requested too, and
    the log-prob is renormalized. Routed experts have no shape: `num_layers` of the model defines it. None requests no
    experts. Raises ConfigError for another server, an old version, or a model with another vocabulary.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: PreTrainedTokenizerBase,
        transfer: Transfer,
        *,
        concurrency: int = 256,
        stop_token_ids: Sequence[int] = (),
        num_layers: int | None = None,
    ):
        super().__init__(server, tokenizer, concurrency=concurrency, stop_token_ids=stop_token_ids)
        self.info = check_release(server, "/server_info", "SGLang", OLDEST, start=SGLANG)
        self.receive_by(transfer)
        self._freed: set[str] = set()
        tells_experts = bool(self.info.get("enable_return_routed_experts")) and num_layers is not None
        self.capabilities = Capabilities(
            logprobs=True,
            weight_updates=True,
            seeds=False,
            hub_names=True,
            at_once=concurrency,
            in_flight_updates=True,
            routing=tells_experts,
        )
        first = self._check_vocabulary(SamplingParams(1, temperature=0.0, routing=tells_experts))
        self._experts_of_token = self._shape_of_experts(first, num_layers) if num_layers and tells_experts else (0, 0)

    def check_params(self, params: SamplingParams) -> None:
        """See `HTTPEngine`."""
        most = int(self.info.get("sampling_mask_max_tokens", 4096))
        if params.top_k > most:
            raise ConfigError(
                f"top_k={params.top_k} must be at most --sampling-mask-max-tokens {most} of {self.server.url}",
                code="out_of_range",
                keys=("rollout.top_k",),
                fix="rollout.top_k=0",
            )
        stages = int(self.info.get("pp_size", 1))
        if params.routing and stages > 1:
            raise ConfigError(
                f"rollout.replay_routing=true is not supported with pp_size={stages} of {self.server.url}: SGLang "
                "returns the experts of one stage only",
                code="unsupported_combination",
                keys=("rollout.replay_routing",),
                fix="rollout.replay_routing=false",
            )

    def _completed(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Completion:
        """See `HTTPEngine`."""
        version, body = self.weight_version, self._body(prompt, params, seed)

        def ask() -> tuple[_Answer, str | None]:
            answer: _Answer = self.server.post("/generate", body)
            return answer, (answer["meta_info"].get("finish_reason") or {}).get("type")

        answer, reason = self.complete_answer(ask)
        meta, tokens = answer["meta_info"], list(answer["output_ids"])
        if reason == "length" and len(tokens) < params.max_new_tokens:
            raise RunError(
                f"{self.server.url} ended a completion after {len(tokens)} of {params.max_new_tokens} tokens, with a "
                f"prompt of {len(prompt)}. Its KV cache or --context-length is too small",
                code="server_mismatch",
                keys=("rollout.max_new_tokens", "rollout.engine.url"),
                fix="python -m sglang.launch_server --model-path MODEL --context-length "
                f"{len(prompt) + params.max_new_tokens + 6}",
            )
        if body["return_sampling_mask"]:
            logprobs = [float(value) for value in meta["output_token_sampling_logprobs"]]
        else:
            logprobs = [float(value) for value, *_ in meta["output_token_logprobs"]]
        if len(logprobs) != len(tokens):
            raise RunError(
                f"{self.server.url} returned {len(tokens)} tokens but {len(logprobs)} log-probs",
                code="invalid_response",
                keys=("rollout.engine.url",),
            )
        oldest, several = self.versions_in(meta.get("weight_versions"), len(tokens), version)
        read = answer.get("prompt_token_ids")
        other = None if read is None or list(read) == list(prompt) else list(read)
        experts = None
        if params.routing:
            num_read = len(prompt) + len(tokens) - 1
            experts = decode_experts(meta.get("routed_experts"), num_read, self._decoded, start=SGLANG_WITH_EXPERTS)
        return Completion(tokens, logprobs, reason, oldest, other, several, experts)

    def _body(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> dict[str, object]:
        """Return a request with all sampling parameters. Missing ones would be filled from
        `--preferred-sampling-params`."""
        return {
            "input_ids": list(prompt),
            "return_logprob": True,
            "return_prompt_token_ids": True,
            "return_sampling_mask": bool(params.top_k),
            "return_routed_experts": params.routing,
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens,
                "min_new_tokens": 0,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": False,
                "stop": None,
                "stop_token_ids": self.stop_token_ids or None,
                "n": 1,
                "skip_special_tokens": False,
                "no_stop_trim": True,  # the token that ended it belongs to it
                "sampling_seed": seed % 2**31,
            },
        }

    # -- weights

    def pause(self) -> None:
        """Running requests go back to the queue, so that their keys and values can be dropped."""
        self.server.post("/pause_generation", {"mode": "retract"})

    def go_on(self, *, retries: int | None = None) -> None:
        self.server.request("POST", "/continue_generation", {}, retries=retries)

    def forget(self) -> None:
        """The calls that replace weights do so themselves."""

    def load_files(self, folder: Path) -> None:
        """See `WeightUpdateMixin`."""
        once(self.server, "/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})

    def num_ranks(self) -> int:
        """See `WeightUpdateMixin`. Raises ConfigError if SGLang has no such group."""
        for key in ("dp_size", "pp_size"):
            if self.info.get(key, 1) != 1:
                raise ConfigError(
                    f"{self.server.url} has {key}={self.info[key]}, but SGLang accepts broadcast weights with "
                    "tp_size only",
                    code="server_mismatch",
                    keys=("rollout.engine.transport",),
                    fix="rollout.engine.transport=files",
                )
        return int(self.info.get("tp_size", 1))

    def name_weights(self, name: str) -> None:
        self.server.post("/update_weight_version", {"new_version": name, "abort_all_requests": False})

    def weights_name(self) -> str | None:
        """See `WeightUpdateMixin`."""
        return (self.server.get("/model_info") or {}).get("weight_version")

    def sleep(self, *, weights_follow: bool) -> None:
        """Weights that are needed again stay on the GPU, unless the server keeps a copy in host memory."""
        dropped = weights_follow or self.info.get("enable_weights_cpu_backup")
        self._freed = {"kv_cache", "weights"} if dropped else {"kv_cache"}
        once(self.server, "/release_memory_occupation", {"tags": sorted(self._freed)})

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """See `WeightUpdateMixin`."""
        if what in self._freed:
            once(self.server, "/resume_memory_occupation", {"tags": [what]})
            self._freed.remove(what)

    # -- what the server is

    def _check_vocabulary(self, params: SamplingParams) -> _Answer:
        """Request the log-prob of the last token of the tokenizer, and return the answer to a prompt of one token. A
        token beyond the vocabulary of the server would crash it later."""
        last = len(self.tokenizer) - 1
        body = self._body([0], params, 0) | {"token_ids_logprob": [last]}
        try:
            answer: _Answer = self.server.post("/generate", body)
        except ServerError as error:
            if error.is_busy_or_gone or "vocabulary" not in error.message:
                raise
            raise ConfigError(
                f"{self.server.url} serves a model with another vocabulary: the tokenizer of this run has {last + 1} "
                f"tokens ({error.message})",
                code="vocabulary_mismatch",
                keys=("rollout.engine.url",),
                fix="python -m sglang.launch_server --model-path MODEL, with the model of this run",
            ) from error
        return answer

    def _shape_of_experts(self, first: _Answer, num_layers: int) -> tuple[int, int]:
        """Return (layers, experts per layer) of a token, from the answer to a prompt of one token."""
        text = first["meta_info"].get("routed_experts")
        number = 0 if text is None else from_int32(text).size
        if not number or number % num_layers:
            raise ConfigError(
                f"{self.server.url} serves a model with another number of layers: it returned {number} experts per "
                f"token, and the model of this run has {num_layers} layers",
                code="server_mismatch",
                keys=("rollout.engine.url",),
                fix="python -m sglang.launch_server --model-path MODEL, with the model of this run",
            )
        return num_layers, number // num_layers

    def _decoded(self, text: str) -> np.ndarray:
        """Return `[T, L, K]` of complete tokens."""
        numbers, of_token = from_int32(text), math.prod(self._experts_of_token)
        return numbers[: len(numbers) // of_token * of_token].reshape(-1, *self._experts_of_token)
