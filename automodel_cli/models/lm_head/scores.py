"""Scores of tokens: how a head computes them, their fields, and their definition without fusion.

Shapes: S supervised tokens, s tokens of a chunk, V vocabulary (of this rank), N tokens whose log-probs are requested,
the label first, K top-k tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lm_head.vocab_parallel import WHOLE, Vocabulary


@dataclass(frozen=True)
class HeadKind:
    """Function that the head applies to `hidden @ W.T`: identity, `* value`, `value * tanh(. / value)`, or another."""

    name: Literal["plain", "scale", "softcap", "generic"]
    value: float = 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of a head. It processes `chunk` tokens at a time. `shaping` None is the plain softmax."""

    kind: HeadKind
    chunk: int
    shaping: SamplingTransform | None = None
    vocabulary: Vocabulary = WHOLE
    entropy: bool = False
    topk: int = 0
    lse: bool = False
    kernels: bool = False
    """Use the Triton kernels for statistics and gradients of logits."""

    @property
    def multiplier(self) -> float:
        """Factor of the logits, applied after a soft cap."""
        scale = self.kind.value if self.kind.name == "scale" else 1.0
        return scale if self.shaping is None else scale / self.shaping.temperature

    @property
    def cap(self) -> float:
        return self.kind.value if self.kind.name == "softcap" else 0.0

    @property
    def filters(self) -> bool:
        return self.shaping is not None and self.shaping.filters

    def logits(self, hidden_sD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the logits as a new fp32 tensor, which the caller may overwrite."""
        z_sV = F.linear(hidden_sD, weight_VD).float()
        if self.kind.name == "scale":
            return z_sV.mul_(self.kind.value)
        if self.kind.name == "softcap":
            # In place: these are the largest tensors of a step.
            return z_sV.div_(self.kind.value).tanh_().mul_(self.kind.value)
        return z_sV

    def shaped(self, z_sV: Tensor, labels_s: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return the logits of the sampling distribution. This is `z_sV` itself if it equals the model's distribution.

        `overwrite`: `z_sV` is not used afterwards, except for the slope of a soft cap.
        """
        if self.shaping is None:
            return z_sV
        if self.shaping.filters:
            return self.vocabulary.own(self.shaping(self.vocabulary.gather(z_sV), labels_s))
        if overwrite and self.kind.name != "softcap":
            return z_sV.div_(self.shaping.temperature)
        return self.shaping(z_sV, labels_s)


class Scores(NamedTuple):
    """fp32 scores of S tokens: log-probs of the requested tokens (0 for a negative id), entropies, top-k tokens, and
    log-sum-exps of the logits."""

    logprobs_SN: Tensor
    entropy_S: Tensor | None = None
    topk_logprobs_SK: Tensor | None = None
    topk_ids_SK: Tensor | None = None
    lse_S: Tensor | None = None


def merge_chunk_scores(chunk_scores: Sequence[Scores], merge: Callable[[list[Tensor]], Tensor]) -> Scores:
    """Merge each field of the scores of all chunks."""
    fields: Any = (None if values[0] is None else merge(list(values)) for values in zip(*chunk_scores, strict=True))
    return Scores(*fields)


def plain_scores(logits_sV: Tensor, ids_sN: Tensor, settings: Settings) -> Scores:
    """Compute scores by the definition from full logits with autograd, for heads that cannot be fused."""
    z_sV = settings.shaped(logits_sV.float(), ids_sN[:, 0])
    logp_sV = z_sV.log_softmax(-1)
    picked_sN = logp_sV.gather(-1, ids_sN.clamp(min=0)).masked_fill(ids_sN < 0, 0)
    lse_s = z_sV.logsumexp(-1) if settings.lse else None
    if not settings.entropy and not settings.topk:
        return Scores(picked_sN, lse_S=lse_s)
    # 0 * -inf is nan. A filtered token has probability 0 and adds nothing to the entropy.
    finite_sV = logp_sV.masked_fill(logp_sV.isinf(), 0) if settings.filters else logp_sV
    entropy_s = -(logp_sV.exp() * finite_sV).sum(-1) if settings.entropy else None
    if not settings.topk:
        return Scores(picked_sN, entropy_s, lse_S=lse_s)
    return Scores(picked_sN, entropy_s, *logp_sV.topk(settings.topk), lse_s)
