"""Attention by its definition: dense softmax over groups of segments, with its backward.

A segment is a run of queries and the run of keys that they may see (`varlen_segments.py`). Query i sees key j if `i +
ahead - window < j <= i + ahead`. `ahead` is the distance from the first key to the first query, 0 for a full document.
Example: a document of 5 tokens behind a shared prefix of 3 has 5 queries, 8 keys and ahead 3. Its first query sees keys
0 to 3.

Shapes: G segments of a group, H query heads (KV heads are repeated), S queries and U keys of a segment, D head width, V
value width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=32)
def visible_mask(
    num_queries: int,
    num_keys: tuple[int, ...],
    ahead: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Return the additive mask `[G, 1, S, U]`: 0 where a query sees a key, -inf elsewhere.

    The shape is `[S, U]` if all segments agree. The result is None if plain causal attention is equivalent. A query
    without any visible key occurs in padding only. It sees the first key, because a softmax over no keys is NaN.
    Cached, because layers repeat few sizes.

    Args:
        num_queries: S, the same for all segments.
        num_keys: number of keys of each segment.
        ahead: distance from the first key to the first query of each segment.
        window: number of visible keys, including the query itself. None: all.
    """
    # Example: two segments with 2 queries each, 3 and 2 keys, ahead 1 and 0. Query i of segment g sees the keys up to i
    # + ahead. `x` is visible:
    #     segment 0   x x .    segment 1   x . .     the third key of segment 1 is padding
    #                 x x x                x x .
    # A window of 2 over 3 queries: x . . / x x . / . x x.
    longest, shortest = max(num_keys), min(num_keys)
    if not any(ahead) and num_queries == longest and (window is None or window >= num_queries):
        return None
    query, key = torch.arange(num_queries, device=device), torch.arange(longest, device=device)
    if len(set(ahead)) == 1 and shortest == longest:
        distance = query[:, None] + ahead[0] - key  # [S, U]
        visible = distance >= 0
    else:
        distance = (query + torch.tensor(ahead, device=device)[:, None])[:, None, :, None] - key  # [G, 1, S, U]
        visible = (distance >= 0) & (key < torch.tensor(num_keys, device=device)[:, None, None, None])
    if window is not None:
        visible &= distance < window
    visible[..., 0] |= ~visible.any(-1)  # padding queries
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def dense(
    query_GHSD: Tensor,
    key_GHUD: Tensor,
    value_GHUV: Tensor,
    mask: Tensor | None = None,
    *,
    sink_H: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Compute `softmax([softcap(q k^T scale) + mask, sink]) v`, the definition, with O(S U) fp32 scores.

    Causal if `mask` is None.
    """
    scores_GHSU = _scores(query_GHSD, key_GHUD, mask, scale, softcap)
    if sink_H is not None:
        # A sink is one more key without a value. It absorbs probability and is dropped after the softmax.
        column = sink_H.float().view(1, -1, 1, 1).expand(*scores_GHSU.shape[:3], 1)
        probs = torch.cat([scores_GHSU, column], -1).softmax(-1)[..., :-1]
    else:
        probs = scores_GHSU.softmax(-1)
    return probs.to(value_GHUV.dtype) @ value_GHUV


def dense_bytes(dtype: torch.dtype, softcap: float | None) -> int:
    """Return the bytes that `dense` saves for backward per pair of query and key.

    These are the fp32 probabilities, a copy in `dtype` if it is narrower, and the tanh of a soft cap.
    """
    exact = torch.float32.itemsize
    return exact * (1 if softcap is None else 2) + (dtype.itemsize if dtype.itemsize < exact else 0)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    # (G, H, S, D) x (G, H, D, U) -> (G, H, S, U). The softmax is in float32 for every input dtype.
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        above = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu_(1)
        return scores.masked_fill(above, float("-inf"))
    return scores + mask


def dense_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output `[G, H, S, V]` and log-sum-exp `[G, H, S]` of the definition, without autograd."""
    scores = _scores(query, key, mask, scale, softcap)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value.float(), lse


def dense_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `out` and `lse` belong to all keys of the queries. The given keys may be a part of them, as in ring attention.
    """
    scores = _scores(query, key, mask, scale, softcap)
    probs = torch.exp(scores - lse.unsqueeze(-1))
    grad, out = grad.float(), out.float()
    # dS = P * (dP - rowsum(dO * O)), the softmax backward of FlashAttention (arXiv:2205.14135, algorithm 4).
    dscores = probs * (grad @ value.float().transpose(2, 3) - (grad * out).sum(-1, keepdim=True))
    if softcap is not None:  # d(c tanh(s / c)) = 1 - tanh(s / c)^2. Masked scores are -inf, so they are zeroed first.
        dscores = dscores * (1 - (scores.masked_fill(probs == 0, 0.0) / softcap).square())
    dscores = dscores * scale
    return dscores @ key.float(), dscores.transpose(2, 3) @ query.float(), probs.transpose(2, 3) @ grad
