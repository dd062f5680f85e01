"""Hidden states and labels -> per-token log-probs, in chunks, so that `[B, T, V]` logits never exist.

Two paths. *Fused*: one autograd function that computes fp32 log-probs chunk by chunk and recomputes each chunk's
logits in backward; for heads that are a matrix product, optionally scaled (Granite, Cohere) or soft-capped (Gemma-2).
*Generic*: the library's own ForCausalLM forward with the base model replaced by a stub, checkpointed per chunk; for
every other head. Which one is decided by measurement on a small random copy of the user's own config (`detect_head`),
never by family name.

Under tensor parallelism the fused head has a shard of the vocabulary: logits stay local, and ranks exchange three
numbers per token. Log-probs and entropies come out whole on every rank.

Positions whose label is IGNORE_INDEX are skipped, not masked: prompts cost nothing here. (On CUDA finding them is one
host sync per microbatch.)

Shapes: B rows, T tokens, D hidden, V vocabulary, S supervised positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.models import compat
from automodel_cli.models.vocabulary import WHOLE, Vocabulary, vocabulary_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_CHUNK_BYTES_CPU = 24 * 2**20  # of fp32 logits: what stays in the last-level cache
_CHUNK_BYTES_DEVICE = 512 * 2**20
_PROBE_VOCAB = 64


@dataclass(frozen=True)
class HeadKind:
    """What the head does to `hidden @ W.T`: nothing, `* value`, `value * tanh(. / value)`, or something else."""

    name: Literal["plain", "scale", "softcap", "generic"]
    value: float = 1.0


class Shaping(Protocol):
    """How sampling turned logits into the distribution it drew from (`rollout.sampling.Shaping`)."""

    @property
    def temperature(self) -> float:
        """What logits are divided by."""

    @property
    def filters(self) -> bool:
        """Does a token's fate depend on the logits of the others?"""

    def __call__(self, logits_SV: Tensor, drawn_S: Tensor, /) -> Tensor:
        """fp32 logits, filtered tokens at -inf and the drawn one never."""


class Head:
    """Log-probs of one model. Holds the model without owning its parameters (the part's `model` child does).

    `shaping` makes them those of the distribution that completions were drawn from (temperature, top-k, top-p); None
    is the plain softmax. Set it around the passes that score or train on completions.

    Its weight is read inside forward, so whoever shards the part must have gathered it by then: keep the output
    embeddings in the part's root group, never wrapped on their own.
    """

    def __init__(self, model: PreTrainedModel, kind: HeadKind, chunk_size: int | None = None):
        self.model, self.kind, self.chunk_size = model, kind, chunk_size
        self.shaping: Shaping | None = None

    def __call__(self, hidden_BTD: Tensor, labels_BT: Tensor) -> HeadOutput:
        """What `HeadOutput` says, of these tokens."""
        index_S = (labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        labels_S = labels_BT.flatten()[index_S]
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not _is_plain_linear(linear):
            logprobs_S = self._generic(hidden_BTD, index_S, labels_S)
        else:
            weight_VD, vocabulary = vocabulary_of(linear.weight)
            hidden_SD = hidden_BTD.flatten(0, 1)[index_S]
            chunk = self.chunk_size or default_chunk_size(weight_VD.shape[0], hidden_SD.device)
            logprobs_S = fused_logprobs(
                hidden_SD,
                weight_VD,
                labels_S,
                self.kind,
                chunk,
                shaping=self.shaping,
                vocabulary=vocabulary,
            )
        zeros_BT = torch.zeros(labels_BT.shape, dtype=torch.float32, device=hidden_BTD.device)
        supervised = torch.unravel_index(index_S, labels_BT.shape)  # no view of a flat tensor: FSDP2 warns about views
        return HeadOutput(zeros_BT.index_put(supervised, logprobs_S))

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """fp32 `[S, V]`, as the model gives them and not shaped: to draw from, never for a whole batch."""
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not _is_plain_linear(linear):
            return head_logits(self.model, hidden_SD[None])[0].float()
        weight_VD, vocabulary = vocabulary_of(linear.weight)
        return vocabulary.gather(_logits(hidden_SD, weight_VD, self.kind))

    def _generic(self, hidden_BTD: Tensor, index_S: Tensor, labels_S: Tensor) -> Tensor:
        vocab = self.model.config.get_text_config().vocab_size
        chunk = self.chunk_size or default_chunk_size(vocab, hidden_BTD.device)

        def part(hidden: Tensor, labels: Tensor) -> Tensor:
            logits_SV = head_logits(self.model, hidden[None])[0].float()
            logprobs_SV = _shaped(logits_SV, labels, self.shaping).log_softmax(-1)
            return logprobs_SV.gather(-1, labels[:, None])[:, 0]

        if len(labels_S) == 0:  # run one token for nothing: every rank must give the head's parameters a gradient
            zero = labels_S.new_zeros(1)
            return self._generic(hidden_BTD, zero, zero)[:0]
        hidden_SD = hidden_BTD.flatten(0, 1)[index_S]
        chunks = zip(hidden_SD.split(chunk), labels_S.split(chunk), strict=True)
        return torch.cat([checkpoint(part, h, y, use_reentrant=False) for h, y in chunks])


def default_chunk_size(vocab: int, device: torch.device) -> int:
    """Tokens per chunk, so that fp32 logits of one chunk fit the cache (CPU) or a modest share of memory."""
    budget = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES_DEVICE
    return max(16, budget // (4 * vocab))


def _is_plain_linear(module: nn.Module | None) -> bool:
    """Exactly torch's linear, no bias: a subclass or an adapter wrapper may compute something else."""
    return type(module) is nn.Linear and module.bias is None


def _shaped(logits_SV: Tensor, labels_S: Tensor, shaping: Shaping | None, vocabulary: Vocabulary = WHOLE) -> Tensor:
    if shaping is None:
        return logits_SV
    if not shaping.filters:
        return shaping(logits_SV, labels_S)
    return vocabulary.own(shaping(vocabulary.gather(logits_SV), labels_S))


def fused_logprobs(
    hidden_SD: Tensor,
    weight_VD: Tensor,
    labels_S: Tensor,
    kind: HeadKind,
    chunk: int,
    *,
    shaping: Shaping | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """fp32 log-probs of the labels (none may be IGNORE_INDEX).

    `weight_VD` has the rows of this rank's `vocabulary`; everything else is the same on all ranks that share it.
    """
    # Early gradients hold one fp32 copy of the weight's gradient through the whole backward: a fair price for a third
    # of the head's time on CPU, not on a GPU, where the head is cheap and memory is not.
    early = torch.is_grad_enabled() and hidden_SD.device.type == "cpu"
    logprobs_S: Tensor = _FusedLogProbs.apply(hidden_SD, weight_VD, labels_S, kind, chunk, early, shaping, vocabulary)
    return logprobs_S


class _FusedLogProbs(torch.autograd.Function):
    """(S, D) hidden, (V, D) weight, (S,) labels -> (S,) fp32 log-probs.

    d log p = onehot(y) - softmax(z), through temperature, soft cap and scale. Backward normally recomputes each chunk's
    logits: four products where plain cross-entropy has three. With `early`, forward already takes the gradients for
    an incoming gradient of 1 while the logits are at hand. They hold for any incoming gradient that is equal for all
    tokens, as every token-mean loss has; backward recomputes when it is not. The weight's gradient is accumulated
    over chunks in fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, kind, chunk, early, shaping, vocabulary):  # type: ignore[no-untyped-def]
        ctx.kind, ctx.chunk, ctx.shaping, ctx.vocabulary = kind, chunk, shaping, vocabulary
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(logprobs)
        grads = _Gradients(hidden, weight, kind, shaping, vocabulary, *ctx.needs_input_grad[:2]) if early else None
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            z = _logits(hidden[part], weight, kind)
            drawn_from = _shaped(z, labels[part], shaping, vocabulary)
            lse[part], picked = vocabulary.statistics(drawn_from, labels[part])
            logprobs[part] = picked - lse[part]
            if grads is not None:
                grads.add(part, z, drawn_from, lse[part], labels[part], torch.ones_like(lse[part]))
        kept = (grads.hidden, grads.weight) if grads is not None else (None, None)
        ctx.save_for_backward(hidden, weight, labels, lse, *kept)
        return logprobs

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, labels, lse, grad_hidden, grad_weight = ctx.saved_tensors
        early = grad_hidden is not None or grad_weight is not None
        if early and len(labels) > 0 and bool((grad == grad[0]).all()):
            grad_hidden = None if grad_hidden is None else grad_hidden * grad[0]
            grad_weight = None if grad_weight is None else grad_weight * grad[0]
        else:
            grads = _Gradients(hidden, weight, ctx.kind, ctx.shaping, ctx.vocabulary, *ctx.needs_input_grad[:2])
            for start in range(0, len(labels), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                z = _logits(hidden[part], weight, ctx.kind)
                drawn_from = _shaped(z, labels[part], ctx.shaping, ctx.vocabulary)
                grads.add(part, z, drawn_from, lse[part], labels[part], grad[part])
            grad_hidden, grad_weight = grads.hidden, grads.weight
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_hidden is not None:
            grad_hidden = ctx.vocabulary.sum(grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None, None, None


class _Gradients:
    """Gradients of hidden (what this rank's vocabulary adds to it) and weight (fp32), filled chunk by chunk; None where
    not needed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        kind: HeadKind,
        shaping: Shaping | None,
        vocabulary: Vocabulary,
        need_hidden: bool,
        need_weight: bool,
    ):
        self._hidden, self._weight, self._kind, self._vocabulary = hidden, weight, kind, vocabulary
        self._slope = 1.0 if shaping is None else 1 / shaping.temperature
        self.hidden = torch.empty_like(hidden) if need_hidden else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None

    def add(self, part: slice, z: Tensor, drawn_from: Tensor, lse: Tensor, labels: Tensor, grad: Tensor) -> None:
        """One chunk: logits z, the shaped ones (overwritten; may be z) with their log-sum-exp, labels and incoming
        gradient per token."""
        slope = 1 - (z / self._kind.value).square_() if self._kind.name == "softcap" else None
        dz = drawn_from.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
        index, is_own = self._vocabulary.local(labels)
        dz.scatter_add_(-1, index[:, None], torch.where(is_own, grad, 0)[:, None])
        if slope is not None:
            dz.mul_(slope)
        elif self._kind.name == "scale":
            dz.mul_(self._kind.value)
        if self._slope != 1:
            dz.mul_(self._slope)
        dz = dz.to(self._hidden.dtype)
        if self.hidden is not None:
            torch.mm(dz, self._weight, out=self.hidden[part])
        if self.weight is not None and self.weight.dtype == dz.dtype:
            self.weight.addmm_(dz.t(), self._hidden[part])
        elif self.weight is not None:
            self.weight += (dz.t() @ self._hidden[part]).float()


def _logits(hidden: Tensor, weight: Tensor, kind: HeadKind) -> Tensor:
    """A fresh fp32 tensor, which the caller may overwrite."""
    z = F.linear(hidden, weight).float()
    if kind.name == "scale":
        return z.mul_(kind.value)
    if kind.name == "softcap":
        return z.div_(kind.value).tanh_().mul_(kind.value)
    return z


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
        logits: Tensor = model(inputs_embeds=hidden_BTD, use_cache=False).logits
        return logits
    finally:
        model._modules[name] = real


@torch.no_grad()
def detect_head(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> HeadKind:
    """Classify the head by what it computes on random hidden states of the config's own width.

    The copy has one layer on the meta device (never run) and a vocabulary of 64; only what is outside the base model
    gets memory. Raises ConfigError where the head cannot be run apart from the base model.
    """
    small = copy.deepcopy(hf_config)
    text = small.get_text_config()
    text.vocab_size, text.pad_token_id = _PROBE_VOCAB, 0  # not every family may do without one
    with compat.quiet():
        model = compat.meta_model(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
    weight_VD = _materialise_head(model)
    if weight_VD is None:
        return HeadKind("generic")
    generator = torch.Generator().manual_seed(1)
    hidden_BTD = torch.randn(1, 32, weight_VD.shape[1], generator=generator) * 4
    try:
        got = head_logits(model, hidden_BTD)
    except Exception as error:
        raise ConfigError(
            f"the head of {type(model).__name__} cannot be run apart from its base model: {error}",
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
