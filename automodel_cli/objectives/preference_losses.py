"""Preference losses of pairs, and the sums of log-probs that they use.

c and r are the chosen and rejected response's sum of log-probs minus that of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from automodel_cli.data.batch import Batch
from automodel_cli.objectives.segment_reduce import label_mask, labels_by_document, sum_by_document, to_tokens

_MAX_LOGPROB = -1e-6
"""Largest log-prob in log-odds, which are infinite at 0."""


_MAX_EXPONENT = 80.0
"""Largest exponent with a finite power in float32."""


@dataclass(frozen=True)
class LossOptions:
    """Parameters of the formulas in `LOSSES`, as in `DPO`."""

    beta: float
    label_smoothing: float = 0.0
    gamma: float | None = None
    tau: float | None = None


@dataclass(frozen=True)
class Pairs:
    """fp32 values per pair: the two log-ratios, whether the pair counts (0 or 1), and inputs of the SFT term."""

    c_P: Tensor
    r_P: Tensor
    valid_P: Tensor
    chosen_logprob_P: Tensor
    rejected_logprob_P: Tensor
    chosen_tokens_P: Tensor
    partners_P2: Tensor | None = None
    """Values of equal rank that the two values of the pair are compared with (`DPO.compared`)."""


def valid_pairs(batch: Batch) -> Tensor:
    """Return bool `[P]`: both responses have a label token."""
    return (labels_by_document(batch)[batch.extra["pairs_P2"]] > 0).all(1)


def gather_pairs(
    logprobs_BT: Tensor, batch: Batch, *, reference: bool, average: bool, tail_weight: float | None = None
) -> Pairs:
    """Return sums (or means) over each response's label tokens, relative to the reference or not.

    `tail_weight`: weight in c and r of tokens beyond the length of the shorter response.
    """
    pairs_P2 = batch.extra["pairs_P2"]
    tokens_P2 = labels_by_document(batch)[pairs_P2]
    logprobs_P2 = sum_by_document(logprobs_BT, batch)[pairs_P2]
    # Subtract per token before summing, so that a reference equal to the policy gives exactly 0.
    ratios_BT = against_reference(logprobs_BT, batch) if reference else logprobs_BT
    if tail_weight is not None:
        ratios_BT = torch.where(_in_both(tokens_P2, batch), ratios_BT, tail_weight * ratios_BT)
    # (B, T) -> one sum per document -> (P, 2): chosen and rejected of each pair.
    ratios_P2 = sum_by_document(ratios_BT, batch)[pairs_P2]
    # `clamp` for pairs without labels. They have weight 0, but 0 / 0 would be nan, and nan * 0 is nan.
    if average:
        ratios_P2 = ratios_P2 / tokens_P2.clamp(min=1)
    return Pairs(
        c_P=ratios_P2[:, 0],
        r_P=ratios_P2[:, 1],
        valid_P=(tokens_P2 > 0).all(1).float(),
        chosen_logprob_P=logprobs_P2[:, 0],
        rejected_logprob_P=logprobs_P2[:, 1],
        chosen_tokens_P=tokens_P2[:, 0],
        partners_P2=batch.extra.get("partners_P2"),
    )


def likelihood_weights(logprobs_BT: Tensor, batch: Batch) -> Tensor:
    """Return e^mean(log p - log sum p^2), multiplied over both responses, without gradient (WPO, arXiv:2406.11827, eq.
    2).

    The log-prob at temperature 1/2 is 2 log p - log sum p^2, so the exponent is the difference of the two log-probs.
    """
    aligned_BT = (batch.extra["sharpened_logprobs_BT"] - logprobs_BT.detach()).masked_fill(~label_mask(batch), 0.0)
    means_S = sum_by_document(aligned_BT, batch) / labels_by_document(batch).clamp(min=1)
    return means_S[batch.extra["pairs_P2"]].sum(1).exp()


def sorted_values(pairs: Pairs, *, paired: bool) -> Tensor:
    """Return `[P, 3]`: two values of each pair, and whether the pair counts.

    The values are the policy's and the reference's log-ratio of chosen to rejected if `paired`, else c and r.
    """
    first_P, second_P = pairs.c_P, pairs.r_P
    if paired:
        first_P = pairs.chosen_logprob_P - pairs.rejected_logprob_P
        second_P = first_P - (pairs.c_P - pairs.r_P)
    return torch.stack([first_P, second_P, pairs.valid_P], 1)


def matched_losses(pairs: Pairs, o: LossOptions, *, paired: bool) -> Tensor:
    """Return the losses of aot and aot_unpaired: -log sigmoid(beta d), for the difference d of values with equal rank.

    The ranks do not change within a step, so a pair needs its own values and two numbers. If both values have a
    gradient (unpaired), the chosen and the rejected response each have a loss with full gradient and half value.
    """
    assert pairs.partners_P2 is not None, "aot needs partners"
    partner_1, partner_2 = pairs.partners_P2.unbind(1)
    if paired:
        return _sigmoid(pairs.chosen_logprob_P - pairs.rejected_logprob_P, partner_1, o)
    both_P = _sigmoid(pairs.c_P, partner_1, o) + _sigmoid(partner_2, pairs.r_P, o)
    # Value L / 2, gradient of L: half of the value was counted twice, the gradient was not.
    return both_P - both_P.detach() / 2


def _in_both(tokens_P2: Tensor, batch: Batch) -> Tensor:
    """Return bool `[B, T]`: label tokens among the first n of their response, for n tokens of the pair's shorter
    response."""
    # Number of labels up to each token. Minus those before the document, it is the rank of a label in its response.
    counted_T = label_mask(batch).flatten().cumsum(0)
    before_S = torch.cat([counted_T.new_zeros(1), counted_T])[batch.cu_seqlens[:-1].long()]
    shared_S = torch.zeros(batch.num_documents, device=tokens_P2.device, dtype=tokens_P2.dtype)
    shared_S = shared_S.index_put((batch.extra["pairs_P2"],), tokens_P2.amin(1, keepdim=True).expand_as(tokens_P2))
    return counted_T.view(batch.shape) - to_tokens(before_S, batch) <= to_tokens(shared_S, batch)


def diverged(pairs: Pairs, name: str, alpha: float | None) -> Pairs:
    """Replace c and r by f'(t) of the divergence for t = e^c and e^r (arXiv:2309.16240, table 1)."""
    if name == "reverse_kl":
        return pairs

    def slope(log_t: Tensor) -> Tensor:
        if name == "forward_kl":
            return 1 - (-log_t).clamp(max=_MAX_EXPONENT).exp()
        if name == "js":
            return math.log(2) + logsigmoid(log_t)
        assert alpha is not None, "checked"
        return ((alpha - 1) * log_t).clamp(max=_MAX_EXPONENT).exp().sub(1) / (alpha - 1)

    return replace(pairs, c_P=slope(pairs.c_P), r_P=slope(pairs.r_P))


def against_reference(logprobs_BT: Tensor, batch: Batch) -> Tensor:
    """Return log-prob minus that of the reference per token, 0 for ignored labels."""
    return (logprobs_BT - batch.extra["ref_logprobs_BT"]).masked_fill(~label_mask(batch), 0.0)


# Example for all formulas: c = 2, r = -1, beta = 0.1, so beta (c - r) = 0.3. sigmoid 0.554, hinge 0.7, ipo (3 - 5)^2 =
# 4, simpo with gamma 0.5: 0.798, nca_pair 1.319, bco_pair 1.243, apo_zero 0.925, apo_down 0.975. A model equal to its
# reference has c = r = 0, for which sigmoid is ln 2 = 0.693.
def _sigmoid(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    logits = o.beta * (c - r)
    e = o.label_smoothing
    return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)


def _robust(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    logits = o.beta * (c - r)
    e = o.label_smoothing
    # The mean of this loss over flipped labels equals the loss of clean labels, if a share e of the labels is flipped.
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def _exo_pair(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    logits = o.beta * (c - r)
    e = o.label_smoothing
    right = logits.sigmoid() * (logsigmoid(logits) - math.log(1 - e))
    return right + (-logits).sigmoid() * (logsigmoid(-logits) - math.log(e))


def _nca_pair(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    return -logsigmoid(o.beta * c) - 0.5 * logsigmoid(-o.beta * c) - 0.5 * logsigmoid(-o.beta * r)


def _apo_zero(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    return 1 - (o.beta * c).sigmoid() + (o.beta * r).sigmoid()


def _apo_down(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    return (o.beta * c).sigmoid() + 1 - (o.beta * (c - r)).sigmoid()


def _discopop(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    logits = o.beta * (c - r)
    blend = (logits / (0.05 if o.tau is None else o.tau)).sigmoid()
    return -logsigmoid(logits) * (1 - blend) + (-logits).exp() * blend


def _simpo(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    logits = o.beta * (c - r) - (0.5 if o.gamma is None else o.gamma)
    e = o.label_smoothing
    return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)


def _orpo(c: Tensor, r: Tensor, o: LossOptions) -> Tensor:
    return -o.beta * logsigmoid(_log_odds(c) - _log_odds(r))


def _log_odds(logprob: Tensor) -> Tensor:
    # log(p / (1 - p)): p = 0.8 gives ln 4 = 1.386. `expm1` keeps precision for p near 1, where 1 - p would cancel.
    below = logprob.clamp(max=_MAX_LOGPROB)
    return below - torch.log(-torch.expm1(below))


LOSSES: dict[str, Callable[[Tensor, Tensor, LossOptions], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "ipo": lambda c, r, o: (c - r - 1 / (2 * o.beta)).square(),
    "hinge": lambda c, r, o: torch.relu(1 - o.beta * (c - r)),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda c, r, o: -logsigmoid(o.beta * c) - logsigmoid(-o.beta * r),
    "sppo_hard": lambda c, r, o: (c - 0.5 / o.beta).square() + (r + 0.5 / o.beta).square(),
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""(c, r, options) -> loss of each pair. sigmoid_norm is sigmoid on means over tokens. aot: see `matched_losses`."""
