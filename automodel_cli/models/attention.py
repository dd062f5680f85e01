"""Packed attention for unmodified Hugging Face models: documents of one row never see each other.

One function is registered in the library's attention registry under the name `packed`, and deliberately no mask
function of that name, so that the library builds no O(T^2) mask. Documents come from `cu_seq_lens_q`, boundaries over
the flattened B*T tokens; without it every row is one document. Causal always. Serves grouped KV heads, sliding
windows, logit soft caps, attention sinks and value heads of another width (latent attention).

Sinks need no special kernel. With a flash output O and log-sum-exp L: L' = logaddexp(L, sink), O' = O * exp(L - L').
The ordinary flash backward given (O', L') recomputes P = exp(S - L') and rowsum(dO * O'), so dq, dk and dv are exact,
and dsink = -sum exp(sink - L') * rowsum(dO * O').

Paths: on CPU torch's flash kernel, documents of similar length together; on CUDA in bf16 or fp16 the variable-length
flash kernel over the whole batch; soft caps and fp32 on CUDA as dense softmax, likewise. The CUDA path has NEVER been
run on a GPU: only its operator signatures were checked. Run tests/gpu before relying on it.

Shapes: B rows, T tokens, H query heads, K kv heads, D head width, V value width, N = B*T tokens, G documents of
a group, S tokens of its longest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError

PACKED = "packed"
_FLASH_MAX_HEAD_DIM = 256  # of the CUDA kernel


def register() -> None:
    """Make `packed` known to the library; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


@contextmanager
def library_attention(model: Any) -> Iterator[None]:
    """Generation needs a KV cache and padding masks, which packed attention refuses: use the library's own inside."""
    before = model.config._attn_implementation
    if before != PACKED:
        yield
        return
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # attention sinks and soft caps have no sdpa form in the library
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def packed_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTV: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registry's contract: returns `(out_BTHV, None)`.

    `sliding_window` W lets a token see W keys of its own document, itself included. `s_aux` `[H]` are the sinks.
    Raises ConfigError for what it cannot compute exactly: dropout, a KV cache, an explicit mask.
    """
    _refuse(query_BHTD, key_BKTD, attention_mask, dropout, kwargs)
    # Under autocast, rotary leaves q and k in fp32 next to a bf16 v. torch's own attention casts them too.
    query_BHTD, key_BKTD = query_BHTD.to(value_BKTV.dtype), key_BKTD.to(value_BKTV.dtype)
    scale = scaling if scaling is not None else query_BHTD.shape[-1] ** -0.5
    if query_BHTD.device.type == "cuda" and softcap is None and _flash_can_run(query_BHTD, value_BKTV):
        out_BTHV = _varlen_cuda(
            query_BHTD, key_BKTD, value_BKTV, s_aux, cu_seq_lens_q, max_length_q, scale, sliding_window
        )
        return out_BTHV, None
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    if groups > 1:
        key_BKTD, value_BKTV = key_BKTD.repeat_interleave(groups, 1), value_BKTV.repeat_interleave(groups, 1)
    if query_BHTD.device.type == "cpu" and softcap is None:
        kernel = functools.partial(_flash_cpu, sink_H=s_aux, scale=scale, window=sliding_window)
    else:
        kernel = functools.partial(dense, sink_H=s_aux, scale=scale, window=sliding_window, softcap=softcap)
    batch = query_BHTD.shape[0]
    bounds = None if cu_seq_lens_q is None else tuple(cu_seq_lens_q.tolist())
    if bounds is None or len(bounds) == batch + 1:  # every row is one document
        return kernel(query_BHTD, key_BKTD, value_BKTV).transpose(1, 2), None
    return _in_groups(kernel, query_BHTD, key_BKTD, value_BKTV, bounds), None


def _in_groups(
    kernel: Callable[..., Tensor], query_BHTD: Tensor, key_BHTD: Tensor, value_BHTV: Tensor, bounds: tuple[int, ...]
) -> Tensor:
    """Run `kernel` on documents of similar length together, padded on the right, where causal attention never looks.

    One kernel call per document would cost more than the attention itself on rows of many short documents.
    """
    batch, heads, length, _ = query_BHTD.shape
    groups, back_N = _groups(bounds, query_BHTD.device)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BHTD, value_BHTV))
    parts = []
    for index_GS in groups:
        q, k, v = (
            x.index_select(0, index_GS.flatten()).unflatten(0, index_GS.shape).transpose(1, 2)
            for x in (flat_q, flat_k, flat_v)
        )
        parts.append(kernel(q, k, v).transpose(1, 2).flatten(0, 1))
    out_NHV = torch.cat(parts).index_select(0, back_N)
    return out_NHV.view(batch, length, heads, -1)


@functools.lru_cache(maxsize=16)
def _groups(bounds: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Documents by similar length: token indices `[documents, longest]` of each group (the last token repeated as
    padding), and where each of the N tokens lies in the groups' tokens one after the other.

    A group's documents are at least half as long as its longest, so padding at most doubles the work; it is far less in
    packed rows. Cached: all layers of a microbatch ask for the same.
    """
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds).diff()
    order = lengths.argsort(descending=True, stable=True)
    order = order[lengths[order] > 0]
    groups, back_N, taken, first = [], torch.empty(bounds[-1], dtype=torch.int64), 0, 0
    while first < len(order):
        longest = int(lengths[order[first]])
        members = order[first:][lengths[order[first:]] * 2 >= longest]
        offset_S = torch.arange(longest)
        index_GS = starts[members, None] + torch.minimum(offset_S, lengths[members, None] - 1)
        real_GS = offset_S < lengths[members, None]
        back_N[index_GS[real_GS]] = taken + real_GS.flatten().nonzero()[:, 0]
        groups.append(index_GS.to(device))
        taken += index_GS.numel()
        first += len(members)
    return groups, back_N.to(device)


def _refuse(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0:
        raise ConfigError(
            f"packed attention has no dropout, the model asks for attention_dropout={dropout}",
            keys=("attention",),
            fix="model.config.attention_dropout=0, or model.attention=eager",
        )
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"packed attention is for whole sequences: {query.shape[2]} queries met {key.shape[2]} cached keys",
            fix="generate inside automodel_cli.models.attention.library_attention(model)",
        )
    if mask is not None:
        raise ConfigError(
            "packed attention takes document boundaries, but this model passed an attention mask of its own",
            keys=("attention",),
            fix="model.attention=eager",
        )
    if kwargs.get("is_causal") is False:
        raise ConfigError("packed attention is causal, this model asks for full attention", fix="model.attention=eager")


@functools.lru_cache(maxsize=32)
def _causal_window_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive `[S, S]`: 0 where a query sees the key, -inf elsewhere. Cached: layers repeat few lengths."""
    position = torch.arange(length, device=device)
    distance_SS = position[:, None] - position[None, :]
    visible_SS = distance_SS >= 0
    if window is not None:
        visible_SS &= distance_SS < window
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~visible_SS, float("-inf"))


def dense(
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSV: Tensor,
    sink_H: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The definition, with O(S^2) scores in fp32: `softmax([softcap(q k^T scale) + mask, sink]) v`."""
    length = query_BHSD.shape[2]
    scores_BHSS = (query_BHSD @ key_BHSD.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores_BHSS = softcap * torch.tanh(scores_BHSS / softcap)
    scores_BHSS = scores_BHSS + _causal_window_mask(length, window, torch.float32, query_BHSD.device)
    if sink_H is not None:
        column = sink_H.float().view(1, -1, 1, 1).expand(*scores_BHSS.shape[:3], 1)
        probs = torch.cat([scores_BHSS, column], -1).softmax(-1)[..., :-1]
    else:
        probs = scores_BHSS.softmax(-1)
    return probs.to(value_BHSV.dtype) @ value_BHSV


def _pad_to_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flash kernels want one head width. Zeros in q and k add nothing to scores; padded value columns are cut off."""
    width = max(query.shape[-1], value.shape[-1])

    def pad(x: Tensor) -> Tensor:
        return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))

    return pad(query), pad(key), pad(value)


def _flash_cpu(
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSV: Tensor,
    sink_H: Tensor | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """Documents padded to one length on torch's CPU flash kernel."""
    length = query_BHSD.shape[2]
    mask = None
    if window is not None and window < length:
        mask = _causal_window_mask(length, window, query_BHSD.dtype, query_BHSD.device)
    q, k, v = _pad_to_one_width(query_BHSD, key_BHSD, value_BHSV)
    out: Tensor = _SinkFlashCPU.apply(q, k, v, sink_H, mask, scale)
    return out[..., : value_BHSV.shape[-1]]


@functools.cache
def _cpu_lse_is_heads_first() -> bool:
    """Builds of torch return the log-sum-exp as [B, H, S] or [B, S, H]; asked once with H != S."""
    x = torch.zeros(1, 2, 3, 8)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)[1].shape[1] == 2


class _SinkFlashCPU(torch.autograd.Function):
    """Flash attention with optional sinks on CPU; causal where `mask` is None."""

    @staticmethod
    def forward(ctx, q, k, v, sink_H, mask, scale):  # type: ignore[no-untyped-def]
        causal = mask is None
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        if sink_H is not None:
            heads_first = _cpu_lse_is_heads_first()
            with_sink = torch.logaddexp(lse, _per_head(sink_H, heads_first))
            factor = torch.exp(lse - with_sink)
            out = (out * (factor if heads_first else factor.transpose(1, 2)).unsqueeze(-1)).to(q.dtype)
            lse = with_sink
        ctx.save_for_backward(q, k, v, out, lse, sink_H, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, sink_H, mask = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        grad_sink = None
        if sink_H is not None:
            heads_first = _cpu_lse_is_heads_first()
            prob = torch.exp(_per_head(sink_H, heads_first) - lse)
            prob_BHS = prob if heads_first else prob.transpose(1, 2)
            grad_sink = -(prob_BHS * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sink_H.dtype)
        return dq, dk, dv, grad_sink, None, None


def _per_head(sink_H: Tensor, heads_first: bool) -> Tensor:
    return sink_H.float().view(1, -1, 1) if heads_first else sink_H.float().view(1, 1, -1)


def _flash_can_run(query: Tensor, value: Tensor) -> bool:
    widest = max(query.shape[-1], value.shape[-1])
    return query.dtype in (torch.bfloat16, torch.float16) and widest <= _FLASH_MAX_HEAD_DIM and widest % 8 == 0


def _varlen_cuda(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTV: Tensor,
    sink_H: Tensor | None,
    cu: Tensor | None,
    max_length: int | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """The whole batch in one variable-length call. Never run on a GPU (see the module's docstring)."""
    batch, _, length, _ = query_BHTD.shape
    if cu is None:
        cu = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query_BHTD.device)
    if max_length is None:
        max_length = length  # an upper bound; a document never crosses a row
    width = value_BKTV.shape[-1]
    padded = _pad_to_one_width(query_BHTD, key_BKTD, value_BKTV)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in padded)
    out_NHV: Tensor = _SinkVarlenCUDA.apply(q, k, v, sink_H, cu, max_length, scale, window)
    return out_NHV[..., :width].unflatten(0, (batch, length))


class _SinkVarlenCUDA(torch.autograd.Function):
    """aten's variable-length flash attention with optional sinks.

    q `[N, H, D]`, k and v `[N, K, D]`, cu int32 `[documents + 1]`, log-sum-exp fp32 `[H, N]`. A window of W keys is
    `window_size_left = W - 1, window_size_right = 0`.
    """

    @staticmethod
    def forward(ctx, q, k, v, sink_H, cu, max_length, scale, window):  # type: ignore[no-untyped-def]
        left, right = (None, None) if window is None else (window - 1, 0)
        out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, cu, cu, max_length, max_length, 0.0, window is None, False),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        if sink_H is not None:
            with_sink = torch.logaddexp(lse, sink_H.float()[:, None])
            out = (out * torch.exp(lse - with_sink).t().unsqueeze(-1)).to(q.dtype)
            lse = with_sink
        ctx.save_for_backward(q, k, v, out, lse, sink_H, cu, rng_state)
        ctx.args = (max_length, scale, left, right)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, sink_H, cu, rng_state = ctx.saved_tensors
        max_length, scale, left, right = ctx.args
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad_out.contiguous(), q, k, v, out, lse, cu, cu, max_length, max_length, 0.0, left is None),
            *(rng_state, unused),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        grad_sink = None
        if sink_H is not None:
            prob_HN = torch.exp(sink_H.float()[:, None] - lse)
            grad_sink = -(prob_HN * (grad_out.float() * out.float()).sum(-1).t()).sum(1).to(sink_H.dtype)
        return dq, dk, dv, grad_sink, None, None, None, None
