"""Everything that objectives read of a linear head, in one pass over chunks of tokens, logits recomputed in backward.

With z the logits that completions are drawn from, p = softmax(z), H the entropy of p:

    d log p(i) / dz = onehot(i) - p            d H / dz = -p (log p + H)

so whatever is asked for, a chunk's logits get the gradient  -p (sum of g_i + e (log p + H)) + sum of g_i onehot(i),
where g_i and e are the incoming gradients of the log-prob of token i (the label, tokens that were asked for, the
likeliest ones) and of the entropy. Then come temperature, soft cap and scale, and two matrix products.

On CUDA a chunk's statistics and the gradient of its logits are one Triton kernel each (`head_kernels.py`) where what is
asked for allows it; the arithmetic is this.

Under tensor parallelism a rank has a shard of the vocabulary; logits stay local (see `vocabulary.py`).

Shapes: S supervised tokens, s those of a chunk, D hidden, V vocabulary (of this rank), N tokens whose log-probs are
asked for, the label first, K the likeliest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.distributed.wgrad_fusion.linear import MainGrad, add_product_
from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lm_head.vocab_parallel import WHOLE, Statistics, Vocabulary


@dataclass(frozen=True)
class HeadKind:
    """What the head does to `hidden @ W.T`: nothing, `* value`, `value * tanh(. / value)`, or something else."""

    name: Literal["plain", "scale", "softcap", "generic"]
    value: float = 1.0


@dataclass(frozen=True)
class Settings:
    """How a head computes. `chunk` tokens at a time; None shaping is the plain softmax."""

    kind: HeadKind
    chunk: int
    shaping: SamplingTransform | None = None
    vocabulary: Vocabulary = WHOLE
    entropy: bool = False
    topk: int = 0
    kernels: bool = False
    """Triton kernels compute the statistics and the gradient of logits."""

    @property
    def multiplier(self) -> float:
        """What logits are multiplied with in the end, after a soft cap."""
        scale = self.kind.value if self.kind.name == "scale" else 1.0
        return scale if self.shaping is None else scale / self.shaping.temperature

    @property
    def cap(self) -> float:
        return self.kind.value if self.kind.name == "softcap" else 0.0

    @property
    def filters(self) -> bool:
        return self.shaping is not None and self.shaping.filters

    def logits(self, hidden_sD: Tensor, weight_VD: Tensor) -> Tensor:
        """A fresh fp32 tensor, which the caller may overwrite."""
        z_sV = F.linear(hidden_sD, weight_VD).float()
        if self.kind.name == "scale":
            return z_sV.mul_(self.kind.value)
        if self.kind.name == "softcap":
            return z_sV.div_(self.kind.value).tanh_().mul_(self.kind.value)
        return z_sV

    def shaped(self, z_sV: Tensor, labels_s: Tensor, *, overwrite: bool = False) -> Tensor:
        """The logits of the distribution that tokens were drawn from; `z_sV` itself where that is the model's own.

        `overwrite`: nobody reads `z_sV` afterwards but for the slope of a soft cap."""
        if self.shaping is None:
            return z_sV
        if self.shaping.filters:
            return self.vocabulary.own(self.shaping(self.vocabulary.gather(z_sV), labels_s))
        if overwrite and self.kind.name != "softcap":
            return z_sV.div_(self.shaping.temperature)
        return self.shaping(z_sV, labels_s)


class Scores(NamedTuple):
    """fp32 of S tokens: log-probs of the asked tokens (0 for an id below 0), entropies, the likeliest tokens."""

    logprobs_SN: Tensor
    entropy_S: Tensor | None = None
    topk_logprobs_SK: Tensor | None = None
    topk_ids_SK: Tensor | None = None


def merge_chunk_scores(of_chunks: Sequence[Scores], merge: Callable[[list[Tensor]], Tensor]) -> Scores:
    """The scores of all chunks, each field that is there merged."""
    fields: Any = (None if values[0] is None else merge(list(values)) for values in zip(*of_chunks, strict=True))
    return Scores(*fields)


def plain_scores(logits_sV: Tensor, ids_sN: Tensor, settings: Settings) -> Scores:
    """The definition, from whole logits, differentiable by autograd; for heads that this file cannot fuse."""
    logp_sV = settings.shaped(logits_sV.float(), ids_sN[:, 0]).log_softmax(-1)
    picked_sN = logp_sV.gather(-1, ids_sN.clamp(min=0)).masked_fill(ids_sN < 0, 0)
    if not settings.entropy and not settings.topk:
        return Scores(picked_sN)
    finite_sV = logp_sV.masked_fill(logp_sV.isinf(), 0) if settings.filters else logp_sV
    entropy_s = -(logp_sV.exp() * finite_sV).sum(-1) if settings.entropy else None
    if not settings.topk:
        return Scores(picked_sN, entropy_s)
    return Scores(picked_sN, entropy_s, *logp_sV.topk(settings.topk))


def fused_scores(
    hidden_SD: Tensor, weight_VD: Tensor, ids_SN: Tensor, settings: Settings, weight_sum: MainGrad | None = None
) -> Scores:
    """`ids_SN[:, 0]` are the labels, all of them tokens; another id may be below 0 for none. The gradient of the weight
    is added to `weight_sum` where there is one that takes it.

    `weight_VD` has the rows of this rank's `settings.vocabulary`; everything else is the same on all ranks that share
    it, and so is what comes out.
    """
    # Early gradients hold one fp32 copy of the weight's gradient through the whole backward: a fair price for a third
    # of the head's time on CPU, not on a GPU, where the head is cheap and memory is not.
    alone = ids_SN.shape[1] == 1 and not settings.entropy and not settings.topk
    early = alone and torch.is_grad_enabled() and hidden_SD.device.type == "cpu" and not settings.kernels
    return Scores(*_FusedScores.apply(hidden_SD, weight_VD, ids_SN, settings, early, weight_sum))


class _FusedScores(torch.autograd.Function):
    """See the module's docstring.

    Backward normally recomputes each chunk's logits: four products where plain cross-entropy has three. With `early`,
    forward already takes the gradients for an incoming gradient of 1 while the logits are at hand. They hold for any
    incoming gradient that is equal for all tokens, as every token-mean loss has; backward recomputes when it is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        settings: Settings,
        early: bool,
        weight_sum: MainGrad | None,
    ) -> tuple[Tensor | None, ...]:
        vocabulary = settings.vocabulary
        logprobs = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        lse = torch.empty(len(ids), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(lse) if settings.entropy else None
        topk_ids = ids.new_empty(len(ids), settings.topk) if settings.topk else None
        topk = torch.empty(topk_ids.shape, dtype=torch.float32, device=hidden.device) if topk_ids is not None else None
        grads = _Gradients(hidden, weight, settings, *ctx.needs_input_grad[:2]) if early else None
        for start in range(0, len(ids), settings.chunk):
            part = slice(start, start + settings.chunk)
            # one chunk at a time: (s, D) hidden -> (s, V) logits -> (s, N) log-probs; only the last outlives the loop
            if settings.kernels:
                found = _statistics_by_kernel(F.linear(hidden[part], weight), ids[part], settings)
            else:
                z = settings.logits(hidden[part], weight)
                drawn_from = settings.shaped(z, ids[part, 0], overwrite=True)
                if topk is not None and topk_ids is not None:
                    topk[part], topk_ids[part] = vocabulary.topk(drawn_from, settings.topk)
                found = vocabulary.statistics(
                    drawn_from, ids[part], entropy=settings.entropy, masked=settings.filters, overwrite=grads is None
                )
                if grads is not None:
                    ones = _Chunk(part, ids[part], torch.ones_like(logprobs[part]))
                    grads.add(ones, z, drawn_from, found.lse_S)
                del z, drawn_from  # before the next chunk's: they are the largest tensors here
            lse[part], logprobs[part] = found.lse_S, found.logprobs_SN
            if entropy is not None and found.entropy_S is not None:
                entropy[part] = found.entropy_S
        if topk is not None:
            topk -= lse[:, None]  # (S, K) logits -> log-probs
        kept = (grads.hidden, grads.weight) if grads is not None else (None, None)
        ctx.save_for_backward(hidden, weight, ids, lse, entropy, topk_ids, *kept)
        ctx.settings, ctx.weight_sum = settings, weight_sum
        ctx.set_materialize_grads(False)
        if topk_ids is not None:
            ctx.mark_non_differentiable(topk_ids)
        return logprobs, entropy, topk, topk_ids

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, lse, entropy, topk_ids, grad_hidden, grad_weight = ctx.saved_tensors
        settings: Settings = ctx.settings
        grad, grad_entropy, grad_topk, _ = incoming
        early = grad_hidden is not None or grad_weight is not None
        if early and grad is not None and len(ids) > 0 and bool((grad == grad[0]).all()):
            grad_hidden = None if grad_hidden is None else grad_hidden * grad[0]
            grad_weight = None if grad_weight is None else grad_weight * grad[0]
        else:
            if grad is None:
                grad = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
            if grad_topk is not None:
                ids, grad = torch.cat([ids, topk_ids], 1), torch.cat([grad, grad_topk], 1)
            wants_hidden, wants_weight, *_ = ctx.needs_input_grad
            place = ctx.weight_sum.place(weight.dtype) if wants_weight and ctx.weight_sum is not None else None
            grads = _Gradients(hidden, weight, settings, wants_hidden, wants_weight, place)
            for start in range(0, len(ids), settings.chunk):
                part = slice(start, start + settings.chunk)
                chunk = _Chunk(part, ids[part], grad[part])
                if grad_entropy is not None:
                    chunk = chunk._replace(entropy_s=entropy[part], grad_entropy_s=grad_entropy[part])
                if settings.kernels:
                    grads.add_by_kernel(chunk, F.linear(hidden[part], weight), lse[part])
                    continue
                z = settings.logits(hidden[part], weight)
                grads.add(chunk, z, settings.shaped(z, ids[part, 0], overwrite=True), lse[part])
                del z
            grad_hidden, grad_weight = grads.hidden, grads.weight
            if place is not None:
                grad_weight = None  # it is where it belongs
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_hidden is not None:
            grad_hidden = settings.vocabulary.sum(grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None


def _statistics_by_kernel(product_sV: Tensor, ids_sN: Tensor, settings: Settings) -> Statistics:
    """Of `hidden @ weight.T` as it is, in any dtype."""
    vocabulary = settings.vocabulary
    columns_sN = vocabulary.columns(ids_sN)
    lse_s, picked_sN, entropy_s = lm_head_kernels.statistics(
        product_sV, columns_sN, settings.multiplier, settings.cap, settings.entropy
    )
    return vocabulary.whole(lse_s, picked_sN, entropy_s if settings.entropy else None, ids_sN)


class _Chunk(NamedTuple):
    """Tokens `part` of all: whose log-probs were asked for, and the incoming gradients."""

    part: slice
    ids_sN: Tensor
    grad_sN: Tensor
    entropy_s: Tensor | None = None
    grad_entropy_s: Tensor | None = None


class _Gradients:
    """Gradients of hidden (what this rank's vocabulary adds to it) and weight (fp32), filled chunk by chunk; None where
    not needed. `place`: of a sum that the weight's is added to, and whether that is new.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        settings: Settings,
        need_hidden: bool,
        need_weight: bool,
        place: tuple[Tensor, bool] | None = None,
    ):
        self._hidden, self._weight, self._settings = hidden, weight, settings
        self.hidden = torch.empty_like(hidden) if need_hidden else None
        self._sum: Tensor | None = None
        self._is_begun = False
        if place is not None:
            self._sum, self._is_begun = place[0], not place[1]
        elif need_weight:
            self._sum = torch.empty_like(weight, dtype=torch.float32)

    @property
    def weight(self) -> Tensor | None:
        if self._sum is not None and not self._is_begun:  # no token has a label
            self._sum.zero_()
        return self._sum

    def add(self, chunk: _Chunk, z_sV: Tensor, drawn_from_sV: Tensor, lse_s: Tensor) -> None:
        """One chunk: logits z (read under a soft cap alone), and the shaped ones (overwritten; may be z) with their
        log-sum-exp."""
        kind, multiplier = self._settings.kind, self._settings.multiplier
        slope_sV = (z_sV / kind.value).square_().neg_().add_(1) if kind.name == "softcap" else None
        if multiplier != 1:  # the gradient is a multiple of those that come in, which are fewer than logits
            of_entropy_s = None if chunk.grad_entropy_s is None else chunk.grad_entropy_s * multiplier
            chunk = chunk._replace(grad_sN=chunk.grad_sN * multiplier, grad_entropy_s=of_entropy_s)
        dz_sV = self._of_logits(chunk, drawn_from_sV.sub_(lse_s[:, None]))
        if slope_sV is not None:
            dz_sV.mul_(slope_sV)
        self._multiply(chunk.part, dz_sV.to(self._hidden.dtype))

    def add_by_kernel(self, chunk: _Chunk, product_sV: Tensor, lse_s: Tensor) -> None:
        """One chunk: `hidden @ weight.T` (overwritten), and the log-sum-exp of the logits made of it."""
        settings = self._settings
        grad_sN = chunk.grad_sN.where(chunk.ids_sN >= 0, 0)
        none = lse_s[:0]
        lm_head_kernels.gradient_(
            product_sV,
            settings.vocabulary.columns(chunk.ids_sN),
            grad_sN,
            lse_s,
            grad_sN.sum(1),
            none if chunk.entropy_s is None else chunk.entropy_s,
            none if chunk.grad_entropy_s is None else chunk.grad_entropy_s,
            settings.multiplier,
            settings.cap,
        )
        self._multiply(chunk.part, product_sV)

    def _multiply(self, part: slice, dz_sV: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(dz_sV, self._weight, out=self.hidden[part])
        if self._sum is not None:
            add_product_(self._sum, dz_sV.t(), self._hidden[part], first=not self._is_begun)
            self._is_begun = True

    def _of_logits(self, chunk: _Chunk, logp_sV: Tensor) -> Tensor:
        """Gradient of the shaped logits, from their log-probs (overwritten)."""
        is_token_sN = chunk.ids_sN >= 0
        grad_sN = chunk.grad_sN.where(is_token_sN, 0)
        total_s1 = grad_sN.sum(1, keepdim=True)
        if chunk.grad_entropy_s is None or chunk.entropy_s is None:
            dz_sV = logp_sV.exp_().mul_(-total_s1)
        else:
            p_sV = logp_sV.exp()
            if self._settings.filters:
                logp_sV.masked_fill_(p_sV == 0, 0)  # -inf where a token was filtered out
            factor_sV = logp_sV.add_(chunk.entropy_s[:, None]).mul_(chunk.grad_entropy_s[:, None]).add_(total_s1)
            dz_sV = factor_sV.mul_(p_sV).neg_()
        index_sN, is_own_sN = self._settings.vocabulary.local(chunk.ids_sN.clamp(min=0))
        return dz_sV.scatter_add_(-1, index_sN, grad_sN.where(is_own_sN, 0))
