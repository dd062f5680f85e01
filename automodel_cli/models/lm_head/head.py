"""Hidden states and labels -> `HeadOutput`, in chunks, so that `[B, T, V]` logits never exist.

Two paths. *Fused* (`head_fused.py`): one autograd function that computes in fp32 chunk by chunk and recomputes each
chunk's logits in backward; for heads that are a matrix product, optionally scaled (Granite, Cohere) or soft-capped
(Gemma-2).
*Generic*: the library's own ForCausalLM forward with the base model replaced by a stub, checkpointed per chunk; for
every other head. Which one is decided by measurement on a small random copy of the user's own config (`detect_head`),
never by family name.

Under tensor parallelism the fused head has a shard of the vocabulary: logits stay local, and ranks exchange a few
numbers per token. Everything comes out whole on every rank.

Positions whose label is IGNORE_INDEX are skipped, not masked: prompts cost nothing here. A batch knows the others since
it was on the host; finding them here (under context parallelism) is one host sync per microbatch on CUDA.

Shapes: B rows, T tokens, D hidden, V vocabulary, S supervised positions; N tokens whose log-probs are asked for, K the
likeliest ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.wgrad_fusion.linear import WgradFusedLinear, weight_sum_of
from automodel_cli.models import transformers_compat
from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.models.lm_head.fused_linear_logprobs import (
    HeadKind,
    Scores,
    Settings,
    fused_scores,
    merge_chunk_scores,
    plain_scores,
)
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lm_head.vocab_parallel import WHOLE, Vocabulary, vocabulary_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_CHUNK_BYTES_CPU = 24 * 2**20  # of fp32 logits: what stays in the last-level cache
_CHUNK_BYTES_CORE = 2**20  # of each thread: what stays in the cache of its core
_CHUNK_TOKENS_CPU = 256  # products with fewer rows are slower than reading logits from further away
_CHUNK_BYTES_DEVICE = 512 * 2**20
_CHUNK_BYTES_KERNELS = 1024 * 2**20  # of logits in the compute dtype: as much memory as the other way's copies take
_PROBE_VOCAB = 64


class Head:
    """Log-probs of one model. Holds the model without owning its parameters (the part's `model` child does).

    `shaping` makes them those of the distribution that completions were drawn from (temperature, top-k, top-p); None
    is the plain softmax. Set it around the passes that score or train on completions.

    Its weight is read inside forward, so whoever shards the part must have gathered it by then: keep the output
    embeddings in the part's root group, never wrapped on their own.
    """

    def __init__(self, model: PreTrainedModel, kind: HeadKind, chunk_size: int | None = None):
        self.model, self.kind, self.chunk_size = model, kind, chunk_size
        self.shaping: SamplingTransform | None = None

    def __call__(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor,
        request: HeadRequest = LOGPROBS,
        token_ids_BTN: Tensor | None = None,
        label_positions_S: Tensor | None = None,
    ) -> HeadOutput:
        """What `HeadOutput` says, of these tokens; `token_ids_BTN` are those of `request.token_ids`,
        `label_positions_S` where the labels are (`Batch.label_positions_S`)."""
        index_S = label_positions_S
        if index_S is None:  # waits for the device
            index_S = (labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        if not request.logprobs:
            index_S = index_S[:0]  # the head's parameters still get their gradient, of zeros
        ids_SN = labels_BT.flatten()[index_S, None]
        if token_ids_BTN is not None:
            ids_SN = torch.cat([ids_SN, token_ids_BTN.flatten(0, 1)[index_S]], 1)
        scores = self._scores(hidden_BTD.flatten(0, 1)[index_S], ids_SN, request)
        where = torch.unravel_index(index_S, labels_BT.shape)  # no view of a flat tensor: FSDP2 warns about views

        def whole(of_S: Tensor | None) -> Tensor | None:
            if of_S is None:
                return None
            zeros = torch.zeros(*labels_BT.shape, *of_S.shape[1:], dtype=of_S.dtype, device=of_S.device)
            return zeros.index_put(where, of_S)

        logprobs_BT = whole(scores.logprobs_SN[:, 0])
        assert logprobs_BT is not None
        return HeadOutput(
            logprobs_BT,
            entropy_BT=whole(scores.entropy_S),
            topk_logprobs_BTK=whole(scores.topk_logprobs_SK),
            topk_ids_BTK=whole(scores.topk_ids_SK),
            token_logprobs_BTN=None if token_ids_BTN is None else whole(scores.logprobs_SN[:, 1:]),
        )

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """fp32 `[S, V]`, as the model gives them and not shaped: to draw from, never for a whole batch."""
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not _is_plain_linear(linear):
            return head_logits(self.model, hidden_SD[None])[0].float()
        weight_VD, vocabulary = vocabulary_of(linear.weight)
        settings = self._settings(LOGPROBS, len(weight_VD), hidden_SD, vocabulary)
        return vocabulary.gather(settings.logits(_narrowed(hidden_SD, weight_VD), weight_VD))

    def _scores(self, hidden_SD: Tensor, ids_SN: Tensor, request: HeadRequest) -> Scores:
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not _is_plain_linear(linear):
            vocab = self.model.config.get_text_config().vocab_size
            return self._generic(hidden_SD, ids_SN, self._settings(request, vocab, hidden_SD))
        weight_VD, vocabulary = vocabulary_of(linear.weight)
        settings = self._settings(request, len(weight_VD), hidden_SD, vocabulary)
        filters = self.shaping is not None and self.shaping.filters
        if kernels_allow(request, ids_SN.shape[1], filters=filters) and lm_head_kernels.has_head_kernels(
            hidden_SD.device.type
        ):
            chunk = self.chunk_size or kernel_chunk_size(len(weight_VD), hidden_SD.dtype)
            settings = replace(settings, chunk=chunk, kernels=True)
        return fused_scores(_narrowed(hidden_SD, weight_VD), weight_VD, ids_SN, settings, weight_sum_of(linear))

    def _settings(
        self, request: HeadRequest, num_logits: int, hidden: Tensor, vocabulary: Vocabulary = WHOLE
    ) -> Settings:
        chunk = self.chunk_size or default_chunk_size(num_logits, hidden.device)
        return Settings(self.kind, chunk, self.shaping, vocabulary, request.entropy, request.topk)

    def _generic(self, hidden_SD: Tensor, ids_SN: Tensor, settings: Settings) -> Scores:
        def part(hidden: Tensor, ids: Tensor) -> Scores:
            return plain_scores(head_logits(self.model, hidden[None])[0], ids, settings)

        if len(ids_SN) == 0:  # run one token for nothing: every rank must give the head's parameters a gradient
            hidden_1D = hidden_SD.new_zeros(1, hidden_SD.shape[1]) + hidden_SD.sum()
            found = self._generic(hidden_1D, ids_SN.new_zeros(1, ids_SN.shape[1]), settings)
            return merge_chunk_scores([found], lambda of_chunks: of_chunks[0][:0])
        chunks = zip(hidden_SD.split(settings.chunk), ids_SN.split(settings.chunk), strict=True)
        return merge_chunk_scores([checkpoint(part, h, ids, use_reentrant=False) for h, ids in chunks], torch.cat)


def default_chunk_size(vocab: int, device: torch.device) -> int:
    """Tokens per chunk, so that fp32 logits of one chunk fit the cache (CPU; that of the cores where these are tokens
    enough for products) or a modest share of memory."""
    if device.type != "cpu":
        return max(16, _CHUNK_BYTES_DEVICE // (4 * vocab))
    most = max(16, _CHUNK_BYTES_CPU // (4 * vocab))
    of_cores = torch.get_num_threads() * _CHUNK_BYTES_CORE // (4 * vocab)
    return min(most, max(_CHUNK_TOKENS_CPU, of_cores))


def kernel_chunk_size(vocab: int, dtype: torch.dtype) -> int:
    """The same for the kernels, which keep one copy of the logits, in the dtype that is computed in."""
    return max(16, _CHUNK_BYTES_KERNELS // (dtype.itemsize * vocab))


def kernels_allow(request: HeadRequest, num_ids: int, *, filters: bool) -> bool:
    """Whether the Triton kernels have what is asked for: log-probs of `num_ids` tokens at each position; `filters`:
    completions were drawn with top-k or top-p."""
    return not request.topk and not filters and num_ids <= lm_head_kernels.MOST_COLUMNS


def _narrowed(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    """Hidden states in the dtype of the head, as the library's own heads cast them: Mamba keeps its residual in fp32
    whatever the parameters are computed in."""
    return hidden_SD.to(weight_VD.dtype) if weight_VD.dtype.itemsize < hidden_SD.dtype.itemsize else hidden_SD


def _is_plain_linear(module: nn.Module | None) -> bool:
    """Exactly torch's linear, no bias: a subclass or an adapter wrapper may compute something else."""
    return module is not None and type(module) in (nn.Linear, WgradFusedLinear) and module.bias is None


class _BaseStub(nn.Module):
    """Stands where the base model was: answers any call with the given hidden states, any attribute with the real's."""

    def __init__(self, real: nn.Module, hidden: Tensor):
        super().__init__()
        self.__dict__["real"], self.__dict__["hidden"] = (
            real,
            hidden,
        )  # no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _stub_output(self.__dict__["hidden"])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["real"], name)
        # Some families call the decoder inside their base model. Embeddings are read for their weights.
        inner = isinstance(found, nn.Module) and any(isinstance(m, nn.ModuleList) for m in found.children())
        return _BaseStub(found, self.__dict__["hidden"]) if inner else found


def _stub_output(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        """Families read extra fields (cross_attentions, cache_params, ...) of the base output: None, all of them."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    return Output(last_hidden_state=hidden)


def head_logits(model: PreTrainedModel, hidden_BTD: Tensor) -> Tensor:
    """What the model's own forward makes of these hidden states: `[B, T, V]`, every cap, scale and bias included."""
    name = model.base_model_prefix
    real = model._modules[name]
    assert real is not None, f"{type(model).__name__} has no base model at {name!r}"
    model._modules[name] = _BaseStub(real, hidden_BTD)
    try:
        output = model(inputs_embeds=hidden_BTD, use_cache=False)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits
    finally:
        model._modules[name] = real


_detected: dict[tuple[type, str], HeadKind] = {}


def detect_head(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> HeadKind:
    """Classify the head by what it computes on random hidden states of the config's own width, once per config and
    process. Raises ConfigError where the head cannot be run apart from the base model."""
    key = (type(hf_config), hf_config.to_json_string())
    if key not in _detected:
        _detected[key] = _detect_head(hf_config, trust_remote_code)
    return _detected[key]


@torch.no_grad()
def _detect_head(hf_config: PretrainedConfig, trust_remote_code: bool) -> HeadKind:
    """The copy is on the meta device (never run) with a vocabulary of 64; only what is outside the base model gets
    memory."""
    small = copy.deepcopy(hf_config)
    text = small.get_text_config()
    text.vocab_size, text.pad_token_id = _PROBE_VOCAB, 0  # not every family may do without one
    with transformers_compat.quiet():
        model = transformers_compat.meta_model(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
    weight_VD = _materialise_head(model)
    if weight_VD is None:
        return HeadKind("generic")
    generator = torch.Generator().manual_seed(1)
    hidden_BTD = torch.randn(1, 32, weight_VD.shape[1], generator=generator) * 4
    try:
        got = head_logits(model, hidden_BTD)
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} is not supported because its head cannot run separately from the base model: "
            f"{error}",
            code="not_supported_by_model",
            keys=("model",),
        ) from error
    return classify(got, F.linear(hidden_BTD, weight_VD), getattr(text, "final_logit_softcapping", None))


def _materialise_head(model: PreTrainedModel) -> Tensor | None:
    """Give random weights to all but the base model; returns the output matrix, None if it is no plain linear."""
    generator = torch.Generator().manual_seed(0)
    for name, child in model.named_children():
        if name != model.base_model_prefix:
            child.to_empty(device="cpu")
            for param in child.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    linear = model.get_output_embeddings()
    return linear.weight if _is_plain_linear(linear) and not linear.weight.is_meta else None


def classify(logits: Tensor, product: Tensor, cap: float | None) -> HeadKind:
    """Compare what came out with the bare matrix product."""
    tolerance = 1e-5 * product.abs().max().item()
    if torch.allclose(logits, product, rtol=0, atol=tolerance):
        return HeadKind("plain")
    scale = ((logits * product).sum() / (product * product).sum()).item()
    if torch.allclose(logits, product * scale, rtol=0, atol=tolerance * abs(scale)):
        return HeadKind("scale", scale)
    if cap and torch.allclose(logits, cap * torch.tanh(product / cap), rtol=0, atol=1e-5 * cap):
        return HeadKind("softcap", float(cap))
    return HeadKind("generic")
