"""Packed attention for unmodified Hugging Face models: documents of one row never see each other.

One function is registered in the library's attention registry under the name `packed`, and deliberately no mask
function of that name, so that the library builds no O(T^2) mask. Documents come from `cu_seq_lens_q`, boundaries over
the flattened B*T tokens; without it every row is one document. Where documents share a prefix (`Batch.seen`), each sees
it before itself. Causal always. Serves grouped KV heads, sliding windows, logit soft caps, attention sinks and value
heads of another width (latent attention).

Paths: on CPU torch's flash kernel, short rows as they lie, else documents of similar length together; on CUDA in bf16
or fp16 the variable-length flash kernel over the whole batch; what that refuses (soft caps, fp32, head widths) by
FlexAttention over the whole batch; what that refuses, and soft caps on a CPU, as dense softmax of documents of similar
length, with a warning that says what it costs. Under context parallelism the queries are this rank's, and keys and
values are gathered first. The CUDA paths have NEVER been run on a GPU: only operator signatures were checked. Run
tests/gpu before relying on them.

Shapes: B rows, T tokens, H query heads, K kv heads, D head width, V value width, N = B*T tokens, M
keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.data.batch import SeenKeys
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernel_selection
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.attention.ring import Setting, ring_attention
from automodel_cli.models.context_parallel_layout import Context

PACKED = "packed"


def register_packed_attention() -> None:
    """Make `packed` known to the library; again is harmless."""
    from transformers import AttentionInterface

    # Runs the kernel once. Inside a checkpointed layer that call would be one of those whose results are kept, and the
    # recomputation, which does not repeat it, would take each result for the next one's.
    kernels.cpu_lse_is_heads_first()
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
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    context: Context | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registry's contract: returns `(out_BTHV, None)`.

    `sliding_window` W lets a token see W keys of its own document, itself included; a prefix is the beginning of each
    document that sees it. `key_index` and its bounds `cu_seq_lens_k` are `SeenKeys`. `s_aux` `[H]` are the sinks. With
    `context` (collective) T are this rank's tokens of rows that other ranks share, and documents are the context's.
    Raises ConfigError for what it cannot compute exactly: dropout, a KV cache, an explicit mask.
    """
    _refuse(query_BHTD, key_BKTD, attention_mask, dropout, kwargs)
    # Under autocast, rotary leaves q and k in fp32 next to a bf16 v. torch's own attention casts them too.
    query_BHTD, key_BKTD = query_BHTD.to(value_BKTV.dtype), key_BKTD.to(value_BKTV.dtype)
    scale = scaling if scaling is not None else query_BHTD.shape[-1] ** -0.5
    way, why_dense = kernel_selection.way(query_BHTD, value_BKTV, softcap)
    rows, _, length, _ = query_BHTD.shape
    setting = Setting(scale, sliding_window, softcap, way)
    on_host = way == "dense" or query_BHTD.device.type == "cpu"  # documents are put together here, not by a kernel
    seen = _seen(cu_seq_lens_k, max_length_k, key_index)
    one_by_one = way != "flex" and on_host and context is None
    documents = segments.HostDocuments.of(cu_seq_lens_q, rows, length, seen) if one_by_one else None
    if why_dense:
        _say_that_it_is_dense(why_dense, functools.partial(_cost, query_BHTD, setting, documents, context))
    in_rows = None if documents is None else _as_rows(documents, query_BHTD, key_BKTD, value_BKTV, s_aux, setting)
    if in_rows is not None:
        return in_rows, None
    q_NHD, k_MKD, v_MKV = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BKTD, value_BKTV))
    if context is not None and context.group.ring:
        return ring_attention(q_NHD, k_MKD, v_MKV, s_aux, context, setting).unflatten(0, (rows, length)), None
    if context is not None:
        k_MKD, v_MKV = _gather(k_MKD, v_MKV, context)
    if way == "flex":
        whose = (cu_seq_lens_q, rows, length, seen) if context is None else context
        out_NHV = attention_flex.flex_packed_attention(
            q_NHD, k_MKD, v_MKV, s_aux, whose, sliding_window, scale, softcap
        )
    elif not on_host:
        batch = cu_seq_lens_q, max_length_q, rows, length, q_NHD.device, seen
        plan = segments.batch_varlen(*batch) if context is None else segments.context_varlen(context, sliding_window)
        pads = kernel_selection.chosen_kernel().pads
        out_NHV = kernels.varlen_cuda(q_NHD, k_MKD, v_MKV, plan, s_aux, scale, sliding_window, pads=pads)
    else:
        groups = _groups(documents, context, sliding_window, q_NHD.device)
        out_NHV = _in_groups(q_NHD, k_MKD, v_MKV, s_aux, setting, *groups)
    return out_NHV.unflatten(0, (rows, length)), None


def _as_rows(
    documents: segments.HostDocuments,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
) -> Tensor | None:
    """`out_BTHV` of whole rows at once, where one mask for each keeps its documents apart; else None."""
    rows, _, length, _ = query_BHTD.shape
    dtype, device = query_BHTD.dtype, query_BHTD.device
    if documents.are_rows(rows):
        mask = kernels.visible_mask(length, (length,), (0,), setting.window, dtype, device)
    elif setting.way != "flash" or (
        (mask := segments.row_mask(documents, length, setting.window, dtype, device)) is None
    ):
        return None
    return _in_rows(_kernel(sink_H, setting), query_BHTD, key_BKTD, value_BKTV, mask)


def _kernel(sink_H: Tensor | None, setting: Setting) -> segments.Kernel:
    """For documents that are put together on the host."""
    if setting.way == "flash":
        return functools.partial(kernels.flash_cpu, sink_H=sink_H, scale=setting.scale)
    return functools.partial(kernels.dense, sink_H=sink_H, scale=setting.scale, softcap=setting.softcap)


def _groups(
    documents: segments.HostDocuments | None, context: Context | None, window: int | None, device: torch.device
) -> tuple[list[segments.Group], Tensor]:
    if context is not None:
        return segments.context_groups(context, window)
    assert documents is not None
    return segments.document_groups(documents, device)


_warned_dense: set[str] = set()


def _say_that_it_is_dense(reason: str, cost: Callable[[], int]) -> None:
    """Once for each reason: on long rows this is most of a step and of its memory."""
    if reason not in _warned_dense:
        _warned_dense.add(reason)
        warn(
            "high_memory_use",
            "attention uses the dense float32 definition. Each layer saves %.3g MiB of this microbatch for backward "
            "and needs about twice as much while it runs. Reason: %s. Shorter documents (data.seq_len) need less",
            cost() / 2**20,
            reason,
        )


def _cost(
    query_BHTD: Tensor, setting: Setting, documents: segments.HostDocuments | None, context: Context | None
) -> int:
    """Bytes that the definition keeps for its backward."""
    rows, heads, length, _ = query_BHTD.shape
    if documents is not None and documents.are_rows(rows):
        pairs = rows * length**2
    else:
        groups, _ = _groups(documents, context, setting.window, query_BHTD.device)
        pairs = sum(group.query_GS.numel() * group.key_GU.shape[1] for group in groups)
    return heads * pairs * kernels.dense_bytes(query_BHTD.dtype, setting.softcap)


def _seen(cu_seq_lens_k: Tensor | None, max_length_k: int | None, key_index: Tensor | None) -> SeenKeys | None:
    if key_index is None:
        return None
    assert cu_seq_lens_k is not None and max_length_k is not None, "`Batch.model_inputs` has them all"
    return SeenKeys(key_index, cu_seq_lens_k, max_length_k)


def _in_rows(
    kernel: segments.Kernel, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTV: Tensor, mask: Tensor | None
) -> Tensor:
    """`out_BTHV` of rows as they lie; causal where `mask` is None."""
    heads = query_BHTD.shape[1]
    key_BHTD, value_BHTV = kernels.per_query_head(key_BKTD, heads), kernels.per_query_head(value_BKTV, heads)
    return kernel(query_BHTD, key_BHTD, value_BHTV, mask).transpose(1, 2)


def _in_groups(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKV: Tensor,
    sink_H: Tensor | None,
    setting: Setting,
    groups: list[segments.Group],
    back_N: Tensor,
) -> Tensor:
    """`out_NHV` of documents that are put together on the host."""
    k_MHD, v_MHV = (kernels.per_query_head(x, q_NHD.shape[1]) for x in (k_MKD, v_MKV))
    return segments.run_grouped(_kernel(sink_H, setting), q_NHD, k_MHD, v_MHV, groups, back_N, setting.window)


def _gather(key_NKD: Tensor, value_NKV: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks in one exchange; side by side, because latent attention has two widths."""
    width = key_NKD.shape[-1]
    both = context.group.gather(torch.cat([key_NKD, value_NKV], -1))
    return both[..., :width], both[..., width:]


def _refuse(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
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
