"""Packed attention for unmodified transformers models. Documents of one row do not attend to each other.

One function is registered in the attention registry of transformers under the name `packed`. No mask function of this
name is registered, so that transformers builds no O(T^2) mask. `cu_seq_lens_q` contains the document boundaries over
the flattened B*T tokens. Without it, every row is one document. If documents share a prefix (`Batch.seen`), each sees
the prefix before its own tokens.

Attention is causal, except inside pictures (`picture_runs`). Supported: grouped KV heads, sliding windows, logit soft
caps, attention sinks, and values of another width than keys (latent attention).

| device | inputs | kernel |
|---|---|---|
| CPU | no soft cap | torch's flash kernel; short rows unchanged, otherwise documents of similar length together |
| CUDA | bf16 or fp16 | variable-length flash kernel over the whole batch |
| CUDA | soft cap, fp32, other head widths, pictures seen in both directions | FlexAttention over the whole batch |
| any | everything else | dense softmax over documents of similar length, with a warning |

With context parallelism, queries are local, and keys and values are gathered or travel around a ring. Layers that see
pictures in both directions always gather them. The CUDA paths have NEVER been run on a GPU. Only operator signatures
were checked. Run tests/gpu before you rely on them.

Shapes: B rows, T tokens, H query heads, K KV heads, D head width, V value width, N = B*T tokens, M keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import SeenKeys
from automodel_cli.models.attention import cudnn, dense, kernel_selection
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.attention.host_groups import (
    as_rows,
    dense_cost,
    groups_of,
    in_groups,
    in_rows,
    kernel_of,
    warn_dense,
)
from automodel_cli.models.attention.picture_runs import PictureRuns
from automodel_cli.models.attention.ring import ring_attention
from automodel_cli.models.attention.ring_calls import Setting
from automodel_cli.models.context_parallel_layout import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = "packed"

_FlatBatch = tuple[Tensor | None, int | None, int, int, torch.device, SeenKeys | None]
"""`cu_seq_lens`, its longest document, rows, length, device, and keys that queries see beyond their own tokens."""


def register_packed_attention() -> None:
    """Register `packed` in the attention registry of transformers. Can be called repeatedly."""
    from transformers import AttentionInterface

    # Run the cached check now. Its first call inside a checkpointed layer would add one saved result, and the
    # recomputation, which does not repeat the call, would read every later result one position off.
    kernels.cpu_lse_is_heads_first()
    AttentionInterface.register(PACKED, packed_attention)


@contextmanager
def library_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the attention of transformers inside the context.

    Generation needs a KV cache and padding masks, which packed attention does not support.
    """
    before = model.config._attn_implementation
    if before != PACKED:
        yield
        return
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # transformers has no sdpa variant for sinks and soft caps
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
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    context: Context | None = None,
    picture_runs: PictureRuns | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement the attention interface of transformers and return `(out_BTHV, None)`.

    Raises ConfigError for inputs without an exact implementation: dropout, a KV cache, an explicit mask.

    Args:
        sliding_window: W, the number of visible keys of the own document, including the token itself. A shared prefix
            counts as the beginning of each document that sees it.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: attention sinks `[H]`.
        key_index, cu_seq_lens_k, max_length_k: see `SeenKeys`.
        picture_runs: pictures whose tokens see each other in both directions in some layers.
        context: context-parallel layout with the documents. T are local tokens then, and the call is collective.
    """
    _check_inputs(query_BHTD, key_BKTD, attention_mask, dropout, kwargs)
    # Under autocast, rotary leaves q and k in fp32 next to a bf16 v. torch's own attention casts them too.
    query_BHTD, key_BKTD = query_BHTD.to(value_BKTV.dtype), key_BKTD.to(value_BKTV.dtype)
    scale = scaling if scaling is not None else query_BHTD.shape[-1] ** -0.5
    way, why_dense = kernel_selection.way(query_BHTD, value_BKTV, softcap)
    rows, length = query_BHTD.shape[0], query_BHTD.shape[2]
    setting = Setting(scale, sliding_window, softcap, way)
    if picture_runs is not None and picture_runs.rule(sliding_window) != "causal":
        assert key_index is None, "checked when the model is built"
        inputs = (query_BHTD, key_BKTD, value_BKTV, s_aux, setting)
        return _two_way(*inputs, picture_runs, cu_seq_lens_q), None
    on_host = way == "dense" or (way != "flex" and query_BHTD.device.type == "cpu")  # no kernel groups the documents
    seen = _seen_keys(cu_seq_lens_k, max_length_k, key_index)
    grouped = on_host and context is None
    documents = segments.HostDocuments.of(cu_seq_lens_q, rows, length, seen) if grouped else None
    if why_dense:
        warn_dense(why_dense, functools.partial(dense_cost, query_BHTD, setting, documents, context))
    # Short rows need no regrouping: the kernel takes them unchanged, with a mask if they contain several documents.
    row_outputs = None if documents is None else as_rows(documents, query_BHTD, key_BKTD, value_BKTV, s_aux, setting)
    if row_outputs is not None:
        return row_outputs, None
    # All other cases work on flat tokens, [N, heads, width].
    q_NHD, k_MKD, v_MKV = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BKTD, value_BKTV))
    batch = (cu_seq_lens_q, max_length_q, rows, length, q_NHD.device, seen)
    out_NHV = _on_flat_tokens(q_NHD, k_MKD, v_MKV, s_aux, setting, batch, documents, context, on_host=on_host)
    return out_NHV.unflatten(0, (rows, length)), None


def _on_flat_tokens(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
    batch: _FlatBatch,
    documents: segments.HostDocuments | None,
    context: Context | None,
    *,
    on_host: bool,
) -> Tensor:
    """Run on flat tokens and return `out_NHV`. `on_host`: group the documents on the host, for kernels without them."""
    if context is not None and context.group.ring:
        return ring_attention(q_NHD, k_MKD, v_MKV, sink_H, context, setting)
    if context is not None:
        k_MKD, v_MKV = _gather(k_MKD, v_MKV, context)
    if on_host:
        groups = groups_of(documents, context, setting.window, q_NHD.device)
        return in_groups(q_NHD, k_MKD, v_MKV, sink_H, setting, *groups)
    return _in_one_kernel(q_NHD, k_MKD, v_MKV, sink_H, setting, batch, context)


def _two_way(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
    runs: PictureRuns,
    cu_seq_lens: Tensor | None,
) -> Tensor:
    """Run a layer in which tokens of a picture see each other, and return `out_BTHV`.

    On CUDA by FlexAttention, because flash kernels are causal. Otherwise with a mask of the rows.
    """
    key_BKTD, value_BKTV = runs.whole_rows(key_BKTD), runs.whole_rows(value_BKTV)
    rows, heads, length, _ = query_BHTD.shape
    on_cpu = query_BHTD.device.type == "cpu"
    no_flex = "" if on_cpu else attention_flex.why_flex_unsupported(query_BHTD, value_BKTV, setting.softcap)
    if no_flex:
        setting = setting._replace(way="dense")
        reason = f"flash kernels are causal, and FlexAttention is not available because {no_flex}"
        pairs = rows * length * key_BKTD.shape[2]
        warn_dense(reason, lambda: heads * pairs * dense.dense_bytes(query_BHTD.dtype, setting.softcap))
    if on_cpu or no_flex:
        kernel = kernel_of(sink_H, setting)
        mask = runs.mask(cu_seq_lens, setting.window, query_BHTD.dtype)
        return in_rows(kernel, query_BHTD, key_BKTD, value_BKTV, mask)
    visible = runs.visible_to(cu_seq_lens, setting.window)
    q_NHD, k_MKD, v_MKV = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BKTD, value_BKTV))
    inputs = (q_NHD, k_MKD, v_MKV, sink_H, visible, setting.window, setting.scale, setting.softcap)
    result: Tensor = attention_flex.flex_packed_attention(*inputs).unflatten(0, (rows, length))
    return result


def _in_one_kernel(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
    batch: _FlatBatch,
    context: Context | None,
) -> Tensor:
    """Run on flat tokens in a kernel that knows the documents, and return `out_NHV`."""
    if setting.way == "flex":
        cu_seq_lens, _, rows, length, _, seen = batch
        layout = (cu_seq_lens, rows, length, seen) if context is None else context
        return attention_flex.flex_packed_attention(
            q_NHD, k_MKD, v_MKV, sink_H, layout, setting.window, setting.scale, setting.softcap
        )
    plan = segments.batch_varlen(*batch) if context is None else segments.context_varlen(context, setting.window)
    chosen = kernel_selection.chosen_kernel()
    if chosen.kernel == "cudnn" and cudnn.supports(q_NHD, v_MKV, plan, sink_H, setting.window):
        return cudnn.varlen_cudnn(q_NHD, k_MKD, v_MKV, plan, setting.scale)
    pads = chosen.pads
    return kernels.varlen_cuda(q_NHD, k_MKD, v_MKV, plan, sink_H, setting.scale, setting.window, pads=pads)


def _seen_keys(cu_seq_lens_k: Tensor | None, max_length_k: int | None, key_index: Tensor | None) -> SeenKeys | None:
    if key_index is None:
        return None
    assert cu_seq_lens_k is not None and max_length_k is not None, "`Batch.model_inputs` has them all"
    return SeenKeys(key_index, cu_seq_lens_k, max_length_k)


def _gather(key_NKD: Tensor, value_NKV: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all ranks in one all-gather.

    They are concatenated along the width, because latent attention has two widths.
    """
    width = key_NKD.shape[-1]
    both = context.group.gather(torch.cat([key_NKD, value_NKV], -1))
    return both[..., :width], both[..., width:]


def _check_inputs(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, object]) -> None:
    if dropout > 0:
        raise ConfigError(
            f"attention_dropout={dropout} is not supported with attn_implementation=packed",
            code="unsupported_combination",
            keys=("attn_implementation",),
            fix="model.config.attention_dropout=0, or model.attn_implementation=eager",
        )
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"packed attention does not support a KV cache: the model passed {query.shape[2]} queries and "
            f"{key.shape[2]} keys",
            code="not_supported",
            fix="generate inside automodel_cli.models.attention.packed.library_attention(model)",
        )
    if mask is not None:
        raise ConfigError(
            "attn_implementation=packed is not supported because the model passes its own attention mask",
            code="not_supported_by_model",
            keys=("attn_implementation",),
            fix="model.attn_implementation=eager",
        )
    if kwargs.get("is_causal") is False:
        raise ConfigError(
            "attn_implementation=packed is not supported because the attention of the model is not causal",
            code="not_supported_by_model",
            keys=("attn_implementation",),
            fix="model.attn_implementation=eager",
        )
