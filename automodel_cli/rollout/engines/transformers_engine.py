"""Reference engine: a replica of the model with `generate` of transformers.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.expert_parallel.router_replay import RouterRecorder, choosing
from automodel_cli.rollout.engines.base import Capabilities, resolve_seeds
from automodel_cli.rollout.engines.sampler.sampling import draw, streams
from automodel_cli.rollout.routed_experts import compact_indices
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class HFEngine:
    """Batched decoding with `generate` of transformers on a separate copy of the model.

    `stop_token_ids` end a completion. `pad_token_id` fills rows and is never attended to. A batch has prompts of
    similar length and at most `max_batch_tokens` tokens, including the completions, or a single prompt.
    """

    capabilities = Capabilities(logprobs=True, weight_updates=True, routing=True)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        max_batch_tokens: int = 16_384,
    ):
        self.model = model.eval()
        # A checkpoint may bring sampling defaults (top_k=50, a repetition penalty) that would leak into every call.
        self.model.generation_config = GenerationConfig()
        self.stop_token_ids = list(stop_token_ids)
        self.pad_token_id = pad_token_id
        self.max_batch_tokens = max_batch_tokens
        self.weight_version = 0

    @classmethod
    def from_config(
        cls,
        hf_config: PretrainedConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> HFEngine:
        """Return a replica without weights (see `update_weights`). Does not change the caller's random state or the
        config.

        `attention=None` selects sdpa, or eager if the family has no sdpa implementation (attention sinks, soft caps).
        The config is copied, because transformers writes the name of the attention into it.
        """

        def build(name: str) -> Any:
            with torch.random.fork_rng(devices=[]):
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(hf_config),
                    attn_implementation=name,
                    dtype=dtype,
                    trust_remote_code=trust_remote_code,
                )

        if attention is not None:
            return cls(build(attention).to(device), **options)
        try:
            model = build("sdpa")
        except ValueError:
            model = build("eager")
        return cls(model.to(device), **options)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion for each prompt, in the order of the prompts. Raises RunError for an empty prompt."""
        seeds = resolve_seeds(prompts, params, seeds)
        completions: dict[int, Completion] = {}
        for batch in self._batches(prompts, params.max_new_tokens):
            done = self._generate_batch([prompts[i] for i in batch], params, [seeds[i] for i in batch])
            completions.update(zip(batch, done, strict=True))
        return [completions[i] for i in range(len(prompts))]

    @torch.no_grad()
    def update_weights(self, stream: WeightStream) -> None:
        """Copy every tensor into the parameter of its name, then count the version up.

        Raises RunError for a name the model does not have, another shape, or a parameter missing in the stream: a
        replica with a mixture of old and new weights must not generate.
        """
        # Tied parameters appear once, under the name that checkpoints use.
        parameters = dict(self.model.named_parameters())
        missing = set(parameters)
        for bucket in stream:
            for name, tensor in bucket:
                if name not in parameters:
                    # A checkpoint may hold a tied tensor under both of its names.
                    if name in self.model.state_dict():
                        continue
                    raise RunError(
                        f"the weight update contains {name!r}, which is not a parameter of {type(self.model).__name__}",
                        code="weights_mismatch",
                    )
                if tensor.shape != parameters[name].shape:
                    raise RunError(
                        f"the weight update contains {name} with shape {list(tensor.shape)}, not "
                        f"{list(parameters[name].shape)}",
                        code="weights_mismatch",
                    )
                parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise RunError(
                f"the weight update lacks {len(missing)} parameters: {', '.join(sorted(missing)[:3])}, ...",
                code="weights_mismatch",
            )
        self.weight_version += 1

    def _batches(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[list[int]]:
        """Indices of prompts that go through the model together: neighbours in length, so that little is padding."""
        batch: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            # Prompts come in growing length: the newest one decides the width of the batch.
            if batch and (len(batch) + 1) * (len(prompts[i]) + max_new_tokens) > self.max_batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _generate_batch(
        self, prompts: list[Sequence[int]], params: SamplingParams, seeds: list[int]
    ) -> list[Completion]:
        width = max(len(prompt) for prompt in prompts)
        input_ids_BT = torch.full((len(prompts), width), self.pad_token_id)
        mask_BT = torch.zeros_like(input_ids_BT)
        for row, prompt in enumerate(prompts):
            input_ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, width - len(prompt) :] = 1
        device = self.model.device
        chooser = _Chooser(params, seeds, device)
        record = _Record(self.model) if params.routing else None
        with record or nullcontext():
            output_BT = self.model.generate(
                input_ids=input_ids_BT.to(device),
                attention_mask=mask_BT.to(device),
                logits_processor=LogitsProcessorList([*_warpers(params), chooser]),
                generation_config=GenerationConfig(
                    do_sample=False,  # the logits processor has sampled and leaves a single token
                    max_new_tokens=params.max_new_tokens,
                    eos_token_id=self.stop_token_ids,
                    pad_token_id=self.pad_token_id,
                ),
            )
        logprobs_BT = chooser.logprobs_BT().cpu().tolist()
        tokens_BT = output_BT[:, width:].cpu().tolist()
        done = [self._completion(tokens, logprobs) for tokens, logprobs in zip(tokens_BT, logprobs_BT, strict=True)]
        if record is None:
            return done
        results = zip(done, prompts, record.chosen_BTLK(), strict=True)
        return [replace(c, routed_experts=_of_tokens(chosen, width, prompt, c)) for c, prompt, chosen in results]

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        """Cut a row after its first stop token. `generate` fills the rest with padding."""
        stops = [i for i, token in enumerate(tokens) if token in self.stop_token_ids]
        end = stops[0] + 1 if stops else len(tokens)
        return Completion(tokens[:end], logprobs[:end], "stop" if stops else "length", self.weight_version)


def _of_tokens(chosen_TLK: np.ndarray, width: int, prompt: Sequence[int], completion: Completion) -> np.ndarray:
    """Remove the padding before the prompt, and tokens read after the completion."""
    return compact_indices(chosen_TLK[width - len(prompt) : width + len(completion.tokens) - 1])


class _Record:
    """Around `generate`: which experts each token of each row went to."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._recorder = model, RouterRecorder()
        self._steps: list[Tensor] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        handle = self._model.register_forward_hook(self._read, with_kwargs=True)
        self._stack.callback(handle.remove)
        self._stack.enter_context(choosing(self._recorder))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _read(self, model: object, args: object, kwargs: dict[str, Any], output: Tensor) -> None:
        rows, tokens = kwargs["input_ids"].shape
        chosen_NLK = self._recorder.stacked(rows * tokens).to(torch.int16)
        self._steps.append(chosen_NLK.unflatten(0, (rows, tokens)))

    def chosen_BTLK(self) -> np.ndarray:
        chosen: np.ndarray = torch.cat(self._steps, 1).cpu().numpy()
        return chosen


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the processors of the library in its order: temperature, top-k, top-p."""
    warpers: list[LogitsProcessor] = []
    if not params.greedy and params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers


class _Chooser(LogitsProcessor):
    """Logits processor that samples the token of each row from its own random stream, and masks all other tokens.

    `generate` samples all rows from one stream, so a sample would depend on the other rows. Stores log-probs of
    sampled tokens as `[B, T]`. `output_scores=True` would store `[T, B, V]`.
    """

    def __init__(self, params: SamplingParams, seeds: list[int], device: torch.device):
        self._columns: list[Tensor] = []
        self._greedy = params.greedy
        count = 0 if params.greedy else params.max_new_tokens
        self._uniform_BT = torch.tensor(streams(seeds, [count] * len(seeds)), dtype=torch.float64, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs_BV = torch.log_softmax(scores.float(), dim=-1)
        if self._greedy:
            token_B = logprobs_BV.argmax(-1)
        else:
            token_B = draw(logprobs_BV, self._uniform_BT[:, len(self._columns)])
        self._columns.append(logprobs_BV.gather(1, token_B[:, None]).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B[:, None], 0.0)

    def logprobs_BT(self) -> Tensor:
        """`[B, new tokens]`, float32."""
        return torch.stack(self._columns, dim=1)
