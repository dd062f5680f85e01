"""Fused linear head: log-probs, entropies and top-k in one pass over chunks of tokens. Logits are recomputed in
backward.

Let z be the logits that completions are sampled from, p = softmax(z), and H the entropy of p:

    d log p(i) / dz = onehot(i) - p            d H / dz = -p (log p + H)

The gradient of a chunk's logits is therefore, for any combination of outputs,

    dz = -p (sum_i g_i + e (log p + H)) + sum_i g_i onehot(i)

where g_i is the incoming gradient of the log-prob of token i (label, requested tokens, top-k tokens) and e that of
the entropy. The gradient l of the log-sum-exp adds p l, because d lse / dz = p. Temperature, soft cap, scale and two
GEMMs follow. Example: with the label alone and loss -log p(label), g = -1, so dz = p - onehot(label), the gradient of
cross-entropy.

On CUDA, the statistics of a chunk and the gradient of its logits are one Triton kernel each (`kernels.py`), if they
support the request. The arithmetic is the same.

With tensor parallelism, a rank has a shard of the vocabulary and logits stay local (`vocab_parallel.py`).

Shapes: S supervised tokens, s tokens of a chunk, D hidden, V vocabulary (of this rank), N tokens whose log-probs are
requested, the label first, K top-k tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.distributed.typed_torch import Ctx, Function
from automodel_cli.distributed.wgrad_fusion.linear import MainGrad, add_product_
from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.models.lm_head.scores import Scores, Settings
from automodel_cli.models.lm_head.vocab_parallel import Statistics


def fused_scores(
    hidden_SD: Tensor, weight_VD: Tensor, ids_SN: Tensor, settings: Settings, weight_sum: MainGrad | None = None
) -> Scores:
    """Compute scores of a linear head with a fused forward and backward.

    Args:
        weight_VD: rows of this rank's `settings.vocabulary`. All other arguments and the results are equal on the
            tensor-parallel ranks.
        ids_SN: requested tokens. `ids_SN[:, 0]` are the labels. Other ids may be negative for none.
        weight_sum: buffer to which the gradient of the weight is added, if it accepts it.
    """
    # Early gradients keep an fp32 copy of the weight gradient during the whole backward. On a CPU this saves a third of
    # the head's time. On a GPU the head is fast and memory is scarce.
    labels_only = ids_SN.shape[1] == 1 and not (settings.entropy or settings.topk or settings.lse)
    early = labels_only and torch.is_grad_enabled() and hidden_SD.device.type == "cpu" and not settings.kernels
    return Scores(*_FusedScores.apply(hidden_SD, weight_VD, ids_SN, settings, early, weight_sum))


# Example: V = 3 with p = (0.7, 0.2, 0.1) and label 1. The log-prob is ln 0.2. With g = -1, dz = p - onehot = (0.7,
# -0.8, 0.1). The entropy is H = 0.802 with dH/dz = -p (log p + H) = (-0.312, 0.162, 0.150). Both sum to 0, because a
# constant added to all logits changes nothing.
# Memory: 8,192 tokens of a vocabulary of 128,256 would be 4.2 GB of fp32 logits. A chunk of 1,046 tokens has 0.5 GB.
class _FusedScores(Function):
    """Autograd function of the fused head. See the module docstring.

    Backward normally recomputes the logits of each chunk: four GEMMs, where plain cross-entropy has three. With
    `early`, forward computes the gradients for an incoming gradient of 1 while the logits are available. They are
    correct for any incoming gradient that is equal for all tokens, as in token-mean losses. Otherwise, backward
    recomputes.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
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
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grads = _Gradients(hidden, weight, settings, need_hidden, need_weight) if early else None
        for start in range(0, len(ids), settings.chunk):
            part = slice(start, start + settings.chunk)
            # One chunk: (s, D) hidden -> (s, V) logits -> (s, N) log-probs. Only the log-probs are kept.
            if settings.kernels:
                stats = _statistics_by_kernel(F.linear(hidden[part], weight), ids[part], settings)
            else:
                z = settings.logits(hidden[part], weight)
                sampling_logits = settings.shaped(z, ids[part, 0], overwrite=True)
                if topk is not None and topk_ids is not None:
                    topk[part], topk_ids[part] = vocabulary.topk(sampling_logits, settings.topk)
                stats = vocabulary.statistics(
                    sampling_logits,
                    ids[part],
                    entropy=settings.entropy,
                    masked=settings.filters,
                    overwrite=grads is None,
                )
                if grads is not None:
                    ones = _Chunk(part, ids[part], torch.ones_like(logprobs[part]))
                    grads.add(ones, z, sampling_logits, stats.lse_S)
                del z, sampling_logits  # free the largest tensors before the next chunk allocates its own
            lse[part], logprobs[part] = stats.lse_S, stats.logprobs_SN
            if entropy is not None and stats.entropy_S is not None:
                entropy[part] = stats.entropy_S
        if topk is not None:
            topk -= lse[:, None]  # (S, K) logits -> log-probs
        early_grads = (grads.hidden, grads.weight) if grads is not None else (None, None)
        ctx.save_for_backward(hidden, weight, ids, lse, entropy, topk_ids, *early_grads)
        ctx.settings, ctx.weight_sum = settings, weight_sum
        ctx.set_materialize_grads(False)
        if topk_ids is not None:
            ctx.mark_non_differentiable(topk_ids)
        return logprobs, entropy, topk, topk_ids, lse.clone() if settings.lse else None

    @staticmethod
    def backward(ctx: Ctx, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, lse, entropy, topk_ids, grad_hidden, grad_weight = ctx.saved_tensors
        settings: Settings = ctx.settings
        grad, grad_entropy, grad_topk, _, grad_lse = incoming
        early = grad_hidden is not None or grad_weight is not None
        # One comparison of S numbers instead of three GEMMs of S x D x V. `early` runs on CPUs only, so `bool` is no
        # device wait.
        if early and grad is not None and len(ids) > 0 and bool((grad == grad[0]).all()):
            grad_hidden = None if grad_hidden is None else grad_hidden * grad[0]
            grad_weight = None if grad_weight is None else grad_weight * grad[0]
        else:
            if grad is None:
                grad = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
            if grad_topk is not None:
                # Top-k log-probs are log-probs of known ids, so their gradient has the same formula.
                ids, grad = torch.cat([ids, topk_ids], 1), torch.cat([grad, grad_topk], 1)
            wants_hidden, wants_weight, *_ = ctx.needs_input_grad
            place = ctx.weight_sum.place(weight.dtype) if wants_weight and ctx.weight_sum is not None else None
            grads = _Gradients(hidden, weight, settings, wants_hidden, wants_weight, place)
            for start in range(0, len(ids), settings.chunk):
                part = slice(start, start + settings.chunk)
                chunk = _Chunk(part, ids[part], grad[part])
                if grad_entropy is not None:
                    chunk = chunk._replace(entropy_s=entropy[part], grad_entropy_s=grad_entropy[part])
                if grad_lse is not None:
                    chunk = chunk._replace(grad_lse_s=grad_lse[part])
                if settings.kernels:
                    grads.add_by_kernel(chunk, F.linear(hidden[part], weight), lse[part])
                    continue
                z = settings.logits(hidden[part], weight)
                grads.add(chunk, z, settings.shaped(z, ids[part, 0], overwrite=True), lse[part])
                del z
            grad_hidden, grad_weight = grads.hidden, grads.weight
            if place is not None:
                grad_weight = None  # already added to the buffer
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_hidden is not None:
            # Each tensor-parallel rank has the part of its vocabulary columns.
            grad_hidden = settings.vocabulary.sum(grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None


def _statistics_by_kernel(matmul_sV: Tensor, ids_sN: Tensor, settings: Settings) -> Statistics:
    """Compute statistics from `hidden @ weight.T` in any dtype with the Triton kernel."""
    vocabulary = settings.vocabulary
    columns_sN = vocabulary.columns(ids_sN)
    lse_s, picked_sN, entropy_s = lm_head_kernels.statistics(
        matmul_sV, columns_sN, settings.multiplier, settings.cap, settings.entropy
    )
    return vocabulary.combine(lse_s, picked_sN, entropy_s if settings.entropy else None, ids_sN)


class _Chunk(NamedTuple):
    """The tokens `part` of the batch: the ids whose log-probs are requested, and the incoming gradients."""

    part: slice
    ids_sN: Tensor
    grad_sN: Tensor
    entropy_s: Tensor | None = None
    grad_entropy_s: Tensor | None = None
    grad_lse_s: Tensor | None = None

    def total(self, grad_sN: Tensor) -> Tensor:
        """Return the factor of -p in the gradient of the logits, without the entropy's. `grad_sN`: of real tokens."""
        total_s = grad_sN.sum(1)
        return total_s if self.grad_lse_s is None else total_s - self.grad_lse_s


class _Gradients:
    """Gradients of the hidden states (the share of this rank's vocabulary) and the weight (fp32), None if not needed.

    Filled chunk by chunk. `place`: an existing buffer to which the gradient of the weight is added, and whether it is
    new.
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
        if self._sum is not None and not self._is_begun:  # no token had a label, so nothing was added
            self._sum.zero_()
        return self._sum

    def add(self, chunk: _Chunk, z_sV: Tensor, sampling_logits_sV: Tensor, lse_s: Tensor) -> None:
        """Add one chunk.

        Args:
            z_sV: logits, used with a soft cap only.
            sampling_logits_sV: shaped logits with log-sum-exp `lse_s`. Overwritten. May be the same tensor as `z_sV`.
        """
        kind, multiplier = self._settings.kind, self._settings.multiplier
        # z = c tanh(x / c) has the slope 1 - tanh^2 = 1 - (z / c)^2, so x is not needed.
        slope_sV = (z_sV / kind.value).square_().neg_().add_(1) if kind.name == "softcap" else None
        if multiplier != 1:  # scale the incoming gradients, which are far fewer than logits
            grad_entropy_s = None if chunk.grad_entropy_s is None else chunk.grad_entropy_s * multiplier
            grad_lse_s = None if chunk.grad_lse_s is None else chunk.grad_lse_s * multiplier
            chunk = chunk._replace(
                grad_sN=chunk.grad_sN * multiplier, grad_entropy_s=grad_entropy_s, grad_lse_s=grad_lse_s
            )
        dz_sV = self._of_logits(chunk, sampling_logits_sV.sub_(lse_s[:, None]))
        if slope_sV is not None:
            dz_sV.mul_(slope_sV)
        self._multiply(chunk.part, dz_sV.to(self._hidden.dtype))

    def add_by_kernel(self, chunk: _Chunk, matmul_sV: Tensor, lse_s: Tensor) -> None:
        """Add one chunk from `hidden @ weight.T` (overwritten) and the log-sum-exp of its logits."""
        settings = self._settings
        grad_sN = chunk.grad_sN.where(chunk.ids_sN >= 0, 0)
        none = lse_s[:0]
        lm_head_kernels.gradient_(
            matmul_sV,
            settings.vocabulary.columns(chunk.ids_sN),
            grad_sN,
            lse_s,
            chunk.total(grad_sN),
            none if chunk.entropy_s is None else chunk.entropy_s,
            none if chunk.grad_entropy_s is None else chunk.grad_entropy_s,
            settings.multiplier,
            settings.cap,
        )
        self._multiply(chunk.part, matmul_sV)

    def _multiply(self, part: slice, dz_sV: Tensor) -> None:
        if self.hidden is not None:
            # (s, V) x (V, D) -> (s, D)
            torch.mm(dz_sV, self._weight, out=self.hidden[part])
        if self._sum is not None:
            # (V, s) x (s, D) -> (V, D), accumulated over chunks in fp32
            add_product_(self._sum, dz_sV.t(), self._hidden[part], first=not self._is_begun)
            self._is_begun = True

    def _of_logits(self, chunk: _Chunk, logp_sV: Tensor) -> Tensor:
        """Gradient of the shaped logits, from their log-probs (overwritten)."""
        is_token_sN = chunk.ids_sN >= 0
        grad_sN = chunk.grad_sN.where(is_token_sN, 0)
        total_s1 = chunk.total(grad_sN)[:, None]
        if chunk.grad_entropy_s is None or chunk.entropy_s is None:
            # dz = sum_n g_n (onehot(id_n) - p). The one-hot part is added below by scatter.
            dz_sV = logp_sV.exp_().mul_(-total_s1)
        else:
            p_sV = logp_sV.exp()
            if self._settings.filters:
                logp_sV.masked_fill_(p_sV == 0, 0)  # -inf where a token was filtered out
            factor_sV = logp_sV.add_(chunk.entropy_s[:, None]).mul_(chunk.grad_entropy_s[:, None]).add_(total_s1)
            dz_sV = factor_sV.mul_(p_sV).neg_()
        index_sN, is_own_sN = self._settings.vocabulary.local(chunk.ids_sN.clamp(min=0))
        # `scatter_add_` and not an assignment: a requested token may be the label too, and both gradients count.
        return dz_sV.scatter_add_(-1, index_sN, grad_sN.where(is_own_sN, 0))
