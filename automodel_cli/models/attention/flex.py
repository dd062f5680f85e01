"""Attention with torch's FlexAttention: soft caps, fp32 and head widths that flash kernels do not support. O(tokens)
memory.

Every query sees one run of positions: from the start of its document or window to itself. If documents share a prefix,
a second run covers the visible part of the prefix. Two integers per query (four with prefixes) and one per key describe
documents, windows and the reordered rows of context parallelism. Example: documents of 3 and 2 tokens with window 2
give position = 0 1 2 3 4 and lower = 0 0 1 3 3.

From these integers follows which blocks of 128 x 128 are skipped, which are fully visible, and which evaluate the mask.
They are computed on the device, once per microbatch and window, and shared by all layers. The compiled kernel receives
them as data, so that other boundaries need no recompilation. A sink is a term of the log-sum-exp L: O' = O sigmoid(L -
sink).

On CUDA, torch compiles to Triton kernels. The first use of each head width, dtype and soft cap compares them with the
definition. On a CPU, the same graph uses the dense definition: slow, exact, for tests. The kernels have NEVER been run
on a GPU.

Shapes: N queries, M keys, H heads, K KV heads, D and V widths of keys and values.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from automodel_cli.data.batch import SeenKeys
from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.distributed.typed_torch import disable
from automodel_cli.models import torch_compat
from automodel_cli.models.context_parallel_layout import Context

_BLOCK = 128
_NARROWEST = 16  # smallest head width of Triton GEMMs
_BACKENDS = {"cpu": "aot_eager"}
_PROBE_ERROR = {torch.float32: 2e-3}  # fp32 GEMMs may use TF32
_PROBE_ERROR_BELOW = 2e-2

_OWN_GRAPH = (
    "FlexAttention is a separate graph, which a layer compiled as one graph cannot contain: "
    "parallelizer.activation_checkpointing=full, or parallelizer.enable_compile=fused_ops"
)

compilations: list[str] = []
"""The device types of all graphs compiled in this process, in order."""


class Visible(NamedTuple):
    """The keys that each query sees, as int32 positions in the flat full rows.

    Query n sees the keys at positions `lower_N[n]` to `position_N[n]`, inclusive. With `prefix`, it also sees those
    from `prefix[0][n]` to before `prefix[1][n]`.
    """

    position_N: Tensor
    lower_N: Tensor
    key_position_M: Tensor
    blocks: BlockMask
    prefix: tuple[Tensor, Tensor] | None = None

    def computed_pairs(self, real: Callable[[Tensor], Tensor | None] = lambda x: x) -> int:
        """Return the number of query-key pairs in blocks that are not skipped.

        `real` returns the values of a tensor, for tensors without values.
        """
        assert self.blocks.full_kv_num_blocks is not None
        counts = [real(count) for count in (self.blocks.kv_num_blocks, self.blocks.full_kv_num_blocks)]
        return sum(int(count.sum()) for count in counts if count is not None) * _BLOCK**2


class Attend(Protocol):
    """Return the output `[N, H, V]` and the log-sum-exp `[H, N]` without the sink.

    A query without visible keys has output 0 and log-sum-exp -inf.
    """

    def __call__(
        self,
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKV: Tensor,
        sink_H: Tensor | None,
        visible: Visible,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]: ...


def attend(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKV: Tensor,
    sink_H: Tensor | None,
    visible: Visible,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention with FlexAttention or its substitute. See `Attend`."""
    if _stand_in is not None:
        return _stand_in(query_NHD, key_MKD, value_MKV, sink_H, visible, scale, softcap)
    width = value_MKV.shape[-1]
    query_1HND, key_1KMD, value_1KMV = (
        _wide_enough(x).transpose(0, 1)[None] for x in (query_NHD, key_MKD, value_MKV)
    )  # fmt: skip
    run = _compiled(query_NHD.device.type)
    # Pass numbers as text. A changing number would become a symbol of the graph, which mask tracing does not support.
    cap = "" if softcap is None else repr(softcap)
    out_1HNV, lse_1HN = run(query_1HND, key_1KMD, value_1KMV, sink_H, visible.blocks, repr(scale), cap)
    return out_1HNV[0].transpose(0, 1)[..., :width], lse_1HN[0]


def use_flex_substitute(run: Attend) -> None:
    """Replace FlexAttention in this process, for tensors without values (dry run)."""
    global _stand_in
    _stand_in = run


_stand_in: Attend | None = None


def _wide_enough(x: Tensor) -> Tensor:
    """Pad to the smallest head width that Triton supports.

    Zeros do not change the scores, and the padded columns of the output are sliced off.
    """
    return x if x.device.type == "cpu" or x.shape[-1] >= _NARROWEST else F.pad(x, (0, _NARROWEST - x.shape[-1]))


@functools.cache
def _compiled(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    backend = _BACKENDS.get(device_type, "inductor")
    return torch_compat.compiled(_graph, backend, lambda: compilations.append(device_type))


def _graph(
    query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, blocks: BlockMask, scale: str, softcap: str
) -> tuple[Tensor, Tensor]:
    """Compute attention and apply the sink. This function is compiled."""

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return float(softcap) * torch.tanh(score / float(softcap))

    out, lse = torch_compat.flex(query, key, value, capped if softcap else None, blocks, float(scale))
    if sink_H is None:
        return out, lse
    exact = torch.promote_types(out.dtype, torch.float32)  # torch traces every log-sum-exp as float32
    # The sink adds exp(sink) to the denominator: exp(L) / (exp(L) + exp(sink)) = sigmoid(L - sink).
    share_1HN1 = torch.sigmoid(lse - sink_H.to(exact).view(1, -1, 1)).unsqueeze(-1)
    return (out * share_1HN1).to(out.dtype), lse


Documents = tuple[Tensor | None, int, int, SeenKeys | None] | Context | Visible
"""Document boundaries of a microbatch (None: rows are documents), number of rows, row length and shared prefixes;
or the context-parallel layout; or the visible keys."""


# Compiled layers contain this function as a separate graph.
@disable(recursive=False, reason=_OWN_GRAPH)
def flex_packed_attention(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKV: Tensor,
    sink_H: Tensor | None,
    documents: Documents,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return `[N, H, V]` of the local tokens of a microbatch. Keys are those of all context-parallel ranks."""
    if isinstance(documents, Visible):
        visible = documents
    elif isinstance(documents, Context):
        visible = context_visibility(documents, window)
    else:
        cu, rows, length, seen = documents
        visible = batch_visibility(cu, rows, length, window, query_NHD.device, seen)
    return attend(query_NHD, key_MKD, value_MKV, sink_H, visible, scale, softcap)[0]


def why_unavailable(device: torch.device) -> str:
    """Return the reason why FlexAttention does not run on this device, or an empty string."""
    if _stand_in is not None:
        return ""
    if device.type != "cuda":
        return f"it requires CUDA, and the device is {device.type}"
    return "" if importlib.util.find_spec("triton") else "it requires triton, which is not installed"


@disable(reason=_OWN_GRAPH)
def why_flex_unsupported(query: Tensor, value: Tensor, softcap: float | None) -> str:
    """Return the reason why FlexAttention does not support these tensors, or an empty string."""
    if query.device.type == "cpu" or _stand_in is not None:
        return ""
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it does not support {str(query.dtype).removeprefix('torch.')}"
    return why_unavailable(query.device) or _disagrees(
        query.device, query.dtype, query.shape[-1], value.shape[-1], softcap
    )


@functools.cache
def _disagrees(device: torch.device, dtype: torch.dtype, width: int, value_width: int, softcap: float | None) -> str:
    """Return the reason why the compiled kernel cannot be used, or an empty string.

    Compiles and runs it once per device, dtype, width and soft cap.
    """
    try:
        # Use a new thread, which has no active graph, recomputation, hooks or modes.
        with threads_on_this_device(1) as thread:
            error = thread.submit(flex_error, device, dtype, width, value_width, softcap).result()
    except Exception as failure:  # compiler errors have no common class
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    limit = _PROBE_ERROR.get(dtype, _PROBE_ERROR_BELOW)
    return f"it differs from the definition by {error:.1e}" if not error <= limit else ""


def flex_error(device: torch.device, dtype: torch.dtype, width: int, value_width: int, softcap: float | None) -> float:
    """Return the largest relative error of outputs and gradients against the fp64 definition.

    Measured on three documents, whose total length is not a multiple of the block size, with grouped heads, a sink and
    a window.
    """
    lengths, scale, window = (90, 40, 170), width**-0.5, 100
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 4, width), (300, 2, width), (300, 2, value_width), (4,))
    leaves = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    visible = visible_intervals(*document_positions(cu, 300, window))
    query, key, value, sink_H = leaves
    got, _ = attend(query, key, value, sink_H, visible, scale, softcap)
    query, key, value, sink_H = exact
    expected = defined(query, key, value, sink_H, visible, scale, softcap)
    grads = torch.autograd.grad(got.double().square().sum(), leaves)
    expected_grads = torch.autograd.grad(expected.square().sum(), exact)
    pairs = [(got.detach(), expected.detach()), *zip(grads, expected_grads, strict=True)]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def defined(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKV: Tensor,
    sink_H: Tensor | None,
    visible: Visible,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return `[N, H, V]` by the formula over all pairs. `attend` is compared with it."""
    group = query_NHD.shape[1] // key_MKD.shape[1]
    scores_HNM = torch.einsum("nhd,mhd->hnm", query_NHD, key_MKD.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores_HNM = softcap * torch.tanh(scores_HNM / softcap)
    # [M] against [N, 1]: (N, M) booleans. Only the definition builds them, the kernel skips blocks.
    key_M = visible.key_position_M
    sees_NM = (key_M <= visible.position_N[:, None]) & (key_M >= visible.lower_N[:, None])
    if visible.prefix is not None:
        first_N, stop_N = visible.prefix
        sees_NM |= (key_M >= first_N[:, None]) & (key_M < stop_N[:, None])
    scores_HNM = scores_HNM.masked_fill(~sees_NM, float("-inf"))
    if sink_H is not None:
        scores_HNM = torch.cat([scores_HNM, sink_H.view(-1, 1, 1).expand(*scores_HNM.shape[:2], 1)], -1)
    probs_HNM = scores_HNM.softmax(-1)[..., : key_M.shape[0]]
    return torch.einsum("hnm,mhv->nhv", probs_HNM, value_MKV.repeat_interleave(group, 1))


@disable()
def batch_visibility(
    cu: Tensor | None,
    rows: int,
    length: int,
    window: int | None,
    device: torch.device,
    seen: SeenKeys | None = None,
) -> Visible:
    """Return the visible keys of full documents.

    Computed once per `cu` (by identity) and window, without host synchronization.
    """
    if cu is None:
        return _row_visibility(rows, length, window, device)
    # All layers of a microbatch pass the same `cu`. The weak reference removes the entry with the tensor, because ids
    # are reused.
    cached = _visibility_cache.setdefault(id(cu), (weakref.ref(cu, _forget(id(cu))), {}))[1]
    if (rows * length, window) not in cached:
        prefix = None if seen is None else _prefix_bounds(cu, seen, rows * length, window)
        cached[rows * length, window] = visible_intervals(*document_positions(cu, rows * length, window), prefix)
    return cached[rows * length, window]


_visibility_cache: dict[int, tuple[weakref.ref[Tensor], dict[tuple[int, int | None], Visible]]] = {}


def _forget(key: int) -> Callable[[object], None]:
    return lambda _, cached=_visibility_cache: cached.pop(key, None)  # type: ignore[misc]


@functools.lru_cache(maxsize=16)
def _row_visibility(rows: int, length: int, window: int | None, device: torch.device) -> Visible:
    cu = torch.arange(0, rows * length + 1, length, device=device)
    return visible_intervals(*document_positions(cu, rows * length, window))


@disable()
@functools.lru_cache(maxsize=64)
def context_visibility(context: Context, window: int | None, of_rank: int | None = None) -> Visible:
    """Return the visible keys of the local queries, among the gathered keys of all ranks or those of one rank."""
    index_M = context.gathered_index()
    cu = torch.tensor(context.bounds, device=index_M.device)
    position, lower, _ = document_positions(cu, len(index_M), window)
    own_N = context.global_index()
    key_position_M = torch.empty_like(position)
    # Keys arrive in the order of ranks. Scatter the positions of the full rows to that order.
    key_position_M[index_M] = position
    if of_rank is not None:
        key_position_M = key_position_M.unflatten(0, (context.group.size, -1))[of_rank].contiguous()
    return visible_intervals(position[own_N], lower[own_N], key_position_M)


def document_positions(cu: Tensor, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token of concatenated documents: position, lowest visible position, key position."""
    # Example: cu 0 3 5 and window 2. Positions 0 1 2 3 4, lowest visible key 0 0 1 3 3: the window, or the start of the
    # document if that is later.
    position, document = _document_of(cu, num_tokens)
    lower = cu[document].to(torch.int32)
    if window is not None:
        # Window W sees W keys including the own position.
        lower = torch.maximum(lower, position - (window - 1))
    return position, lower, position


def _document_of(cu: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the position of each token and the index of its document."""
    position = torch.arange(num_tokens, dtype=torch.int32, device=cu.device)
    return position, torch.searchsorted(cu[1:].contiguous(), position.to(cu.dtype), right=True)


def _prefix_bounds(cu: Tensor, seen: SeenKeys, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the first and end position of the visible part of each token's prefix.

    The values are (largest integer, 0) if nothing is visible.
    """
    position, document = _document_of(cu, num_tokens)
    start, length = (x[document] for x in seen.prefixes(cu))
    first, stop = start, start + length
    if window is not None:  # the part of the last W tokens before the own document
        first = torch.maximum(start, stop - (window - 1) + (position - cu[document]))
    nothing = first >= stop
    first = first.masked_fill(nothing, torch.iinfo(torch.int32).max)
    return first.to(torch.int32), stop.masked_fill(nothing, 0).to(torch.int32)


def visible_intervals(
    position_N: Tensor, lower_N: Tensor, key_position_M: Tensor, prefix: tuple[Tensor, Tensor] | None = None
) -> Visible:
    """Build the block mask from positions. A block is skipped, fully visible, or evaluates the mask."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = key_position_M[key]
        own = (at <= position_N[query]) & (at >= lower_N[query])
        return own if prefix is None else own | ((at >= prefix[0][query]) & (at < prefix[1][query]))

    # Smallest and largest value in each block of 128 queries or keys.
    first, last = _ends(position_N)
    least, most = _ends(lower_N)
    key_first, key_last = (x[None] for x in _ends(key_position_M))
    # Possibly visible: the ranges of keys and of visible positions overlap. All other blocks are skipped.
    touched = (key_last >= least[:, None]) & (key_first <= last[:, None])
    # The last block may contain padding, which only the mask excludes.
    whole_Q, whole_K = (torch.arange(1, len(x) + 1, device=x.device) * _BLOCK for x in (first, key_first[0]))
    inside = (whole_Q <= len(position_N))[:, None] & (whole_K <= len(key_position_M))
    # Fully visible: every key of the block is visible to every query of the block.
    full = (key_first >= most[:, None]) & (key_last <= first[:, None])
    if prefix is not None:
        (earliest, latest), (least_stop, most_stop) = _ends(prefix[0]), _ends(prefix[1])
        touched |= (key_last >= earliest[:, None]) & (key_first < most_stop[:, None])
        full |= (key_first >= latest[:, None]) & (key_last < least_stop[:, None])
    full &= inside
    blocks = BlockMask.from_kv_blocks(
        *_listed(touched & ~full),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(len(position_N), len(key_position_M)),
    )
    return Visible(position_N, lower_N, key_position_M, blocks, prefix)


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each block. The last block is padded with its last value."""
    padded = torch.cat([x, x[-1:].expand(-len(x) % _BLOCK)]).view(-1, _BLOCK)
    return padded.amin(1), padded.amax(1)


def _listed(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected key blocks per query block, and their indices first in each row."""
    order_QK = blocks_QK.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks_QK.sum(1, dtype=torch.int32)[None, None], order_QK.to(torch.int32)[None, None]
