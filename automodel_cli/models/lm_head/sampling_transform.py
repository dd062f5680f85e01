"""From logits to the distribution sampled from: what sampling does to them, and what scores the samples then.

Order: temperature, then top-k, then top-p, as in the library's `generate`. A filtered-out token has logit -inf, so that
`log_softmax` renormalises over what is left.

Shapes: S positions (one row of a batch while decoding), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingTransform:
    """What sampling does to logits; hand it to the head that scores completions (`Head.shaping`).

    `temperature` divides; `top_k` 0 and `top_p` 1 keep every token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def __call__(self, logits_SV: Tensor, drawn_S: Tensor | None = None) -> Tensor:
        """fp32 logits of the sampled distribution, a new tensor unless nothing is to do.

        `drawn_S`: tokens that stay whatever the filters say. A token at the edge of top-p may fall on the other side
        when the trainer computes its logits again with other rounding; it was drawn, so its probability is not zero.
        """
        logits_SV = logits_SV.float()
        if self.temperature != 1:
            logits_SV = logits_SV / self.temperature
        if not self.filters:
            return logits_SV
        dropped_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
        if 0 < self.top_k < logits_SV.shape[-1]:
            dropped_SV = logits_SV < logits_SV.topk(self.top_k, dim=-1).values[:, -1:]
        if self.top_p < 1:
            dropped_SV |= self._outside_top_p(logits_SV.masked_fill(dropped_SV, -torch.inf))
        if drawn_S is not None:
            dropped_SV.scatter_(-1, drawn_S[:, None], False)
        return logits_SV.masked_fill(dropped_SV, -torch.inf)

    def _outside_top_p(self, logits_SV: Tensor) -> Tensor:
        """A token stays while the more likely ones sum to less than top_p. Summed from the small end: exact there."""
        ascending_SV, order_SV = logits_SV.sort(dim=-1)
        outside_SV = ascending_SV.softmax(-1).cumsum(-1) <= 1 - self.top_p
        outside_SV[:, -1] = False
        return torch.zeros_like(outside_SV).scatter_(-1, order_SV, outside_SV)
