"""Temperature, top-k and top-p: transforms logits to the distribution that tokens are sampled from.

The sampler and the scorer use the same code. Order: temperature, top-k, top-p, as in `generate` of transformers.
Filtered tokens have logit -inf, so that `log_softmax` renormalizes over the remaining tokens.

Shapes: S positions (one row of a batch while decoding), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingTransform:
    """Transform of logits for sampling. Assign it to `Head.shaping` to score completions.

    temperature: divides the logits.
    top_k: number of tokens to keep, 0 for all.
    top_p: probability mass to keep, 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def __call__(self, logits_SV: Tensor, sampled_S: Tensor | None = None) -> Tensor:
        """Return fp32 logits of the sampling distribution. A new tensor, unless nothing changes.

        `sampled_S`: tokens that are never filtered. The trainer recomputes logits with other rounding, so a sampled
        token at the edge of top-p could fall outside. Its probability is not zero.
        """
        logits_SV = logits_SV.float()
        if self.temperature != 1:
            logits_SV = logits_SV / self.temperature
        if not self.filters:
            return logits_SV
        # Example: probabilities 0.5, 0.3, 0.15, 0.05. Temperature 0.5 squares them: 0.685, 0.247, 0.062, 0.007. top_k 2
        # keeps 0.625, 0.375. top_p 0.9 keeps three tokens, because the first two sum to 0.8.
        dropped_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
        if 0 < self.top_k < logits_SV.shape[-1]:
            dropped_SV = logits_SV < logits_SV.topk(self.top_k, dim=-1).values[:, -1:]
        if self.top_p < 1:
            dropped_SV |= self._outside_top_p(logits_SV.masked_fill(dropped_SV, -torch.inf))
        if sampled_S is not None:
            dropped_SV.scatter_(-1, sampled_S[:, None], False)
        return logits_SV.masked_fill(dropped_SV, -torch.inf)

    def _outside_top_p(self, logits_SV: Tensor) -> Tensor:
        """Return the tokens to drop. A token is kept if the more likely tokens sum to less than top_p.

        Probabilities are summed from the smallest, which is exact near the edge.
        """
        ascending_SV, order_SV = logits_SV.sort(dim=-1)
        outside_SV = ascending_SV.softmax(-1).cumsum(-1) <= 1 - self.top_p
        # The likeliest token is always kept, also if rounding of `1 - top_p` excludes it.
        outside_SV[:, -1] = False
        return torch.zeros_like(outside_SV).scatter_(-1, order_SV, outside_SV)
