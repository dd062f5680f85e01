"""Attention by torch's FlexAttention: what flash kernels refuse (soft caps, float32, head widths), in memory O(tokens).

Every query sees one run of positions of the rows: from the start of its document, or the window's, up to itself; and
where documents share a prefix a second one, what the window leaves of that. Two integers a query (four) and one a key
say so for documents, windows and the shuffled rows of context parallelism alike, and from them follows which blocks of
128 x 128 are skipped, which are whole, and which ask the mask. All of it is computed on the device, once for a
microbatch and window, and shared by its layers; the compiled kernel takes it as data, so other document bounds are no
other graph. A sink is a term of the log-sum-exp L: O' = O sigmoid(L - sink).

On CUDA torch compiles it to Triton kernels; the first use of each head width, dtype and soft cap compares them with the
definition. On a CPU the same graph runs by the operator's dense definition: slow, exact, for tests. The kernels have
NEVER run on a GPU. Shapes: N queries, M keys, H heads, K kv heads, D and V widths of keys and values.
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
from automodel_cli.models import torch_compat
from automodel_cli.models.context_parallel_layout import Context

_BLOCK = 128
_NARROWEST = 16  # head width of Triton's products
_BACKENDS = {"cpu": "aot_eager"}
_PROBE_ERROR = {torch.float32: 2e-3}  # products of float32 may be allowed to use tf32
_PROBE_ERROR_BELOW = 2e-2

_OWN_GRAPH = (
    "FlexAttention is a graph of its own, which a layer compiled as one graph cannot hold: "
    "parallelizer.activation_checkpointing=full, or parallelizer.enable_compile=fused_ops"
)

compilations: list[str] = []
"""The device type of every graph that was compiled in this process, in order."""


class Visible(NamedTuple):
    """Which keys each query sees: those at positions from `lower_N` to `position_N` of the flat whole rows, and with
    `prefix` those from its first to before its second tensor. int32."""

    position_N: Tensor
    lower_N: Tensor
    key_position_M: Tensor
    blocks: BlockMask
    prefix: tuple[Tensor, Tensor] | None = None

    def computed_pairs(self, real: Callable[[Tensor], Tensor | None] = lambda x: x) -> int:
        """Pairs of query and key in blocks that are not skipped. `real` gives the values of a tensor."""
        assert self.blocks.full_kv_num_blocks is not None
        counts = [real(count) for count in (self.blocks.kv_num_blocks, self.blocks.full_kv_num_blocks)]
        return sum(int(count.sum()) for count in counts if count is not None) * _BLOCK**2


class Attend(Protocol):
    """`(query_NHD, key_MKD, value_MKV, sink_H or None, visible, scale, softcap)` -> output `[N, H, V]`, log-sum-exp
    `[H, N]` with the sink's part left out. A query that sees no key gets 0 and -inf."""

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
    """See `Attend`."""
    if _stand_in is not None:
        return _stand_in(query_NHD, key_MKD, value_MKV, sink_H, visible, scale, softcap)
    width = value_MKV.shape[-1]
    query_1HND, key_1KMD, value_1KMV = (
        _wide_enough(x).transpose(0, 1)[None] for x in (query_NHD, key_MKD, value_MKV)
    )  # fmt: skip
    run = _compiled(query_NHD.device.type)
    # Numbers go in as text: one that changes would become a symbol of the graph, which the mask's tracing cannot hold.
    cap = "" if softcap is None else repr(softcap)
    out_1HNV, lse_1HN = run(query_1HND, key_1KMD, value_1KMV, sink_H, visible.blocks, repr(scale), cap)
    return out_1HNV[0].transpose(0, 1)[..., :width], lse_1HN[0]


def use_flex_substitute(run: Attend) -> None:
    """For tensors without values, in the rest of this process."""
    global _stand_in
    _stand_in = run


_stand_in: Attend | None = None


def _wide_enough(x: Tensor) -> Tensor:
    """Zeros add nothing to scores, and columns of zero values are cut off."""
    return x if x.device.type == "cpu" or x.shape[-1] >= _NARROWEST else F.pad(x, (0, _NARROWEST - x.shape[-1]))


@functools.cache
def _compiled(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    backend = _BACKENDS.get(device_type, "inductor")
    return torch_compat.compiled(_graph, backend, lambda: compilations.append(device_type))


def _graph(
    query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, blocks: BlockMask, scale: str, softcap: str
) -> tuple[Tensor, Tensor]:
    """What is compiled."""

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return float(softcap) * torch.tanh(score / float(softcap))

    out, lse = torch_compat.flex(query, key, value, capped if softcap else None, blocks, float(scale))
    if sink_H is None:
        return out, lse
    exact = torch.promote_types(out.dtype, torch.float32)  # torch's tracing takes any log-sum-exp for float32
    share_1HN1 = torch.sigmoid(lse - sink_H.to(exact).view(1, -1, 1)).unsqueeze(-1)
    return (out * share_1HN1).to(out.dtype), lse


Documents = tuple[Tensor | None, int, int, SeenKeys | None] | Context
"""Bounds of a microbatch's documents (None: rows are documents), rows, their length, and what documents see besides
themselves; or what ranks share."""


# Whole layers may be compiled around this: it is a graph of its own there.
@torch.compiler.disable(recursive=False, reason=_OWN_GRAPH)
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
    """`[N, H, V]` of a microbatch's tokens; under context parallelism of this rank's, over all ranks' keys."""
    if isinstance(documents, Context):
        visible = of_context(documents, window)
    else:
        cu, rows, length, seen = documents
        visible = of_batch(cu, rows, length, window, query_NHD.device, seen)
    return attend(query_NHD, key_MKD, value_MKV, sink_H, visible, scale, softcap)[0]


def why_unavailable(device: torch.device) -> str:
    """What keeps FlexAttention from devices of this kind; empty where nothing does."""
    if _stand_in is not None:
        return ""
    if device.type != "cuda":
        return f"it requires CUDA, and the device is {device.type}"
    return "" if importlib.util.find_spec("triton") else "it requires triton, which is not installed"


@torch.compiler.disable(reason=_OWN_GRAPH)
def why_flex_unsupported(query: Tensor, value: Tensor, softcap: float | None) -> str:
    """What keeps FlexAttention from tensors of this kind, for a sentence; empty where nothing does."""
    if query.device.type == "cpu" or _stand_in is not None:
        return ""
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it does not support {str(query.dtype).removeprefix('torch.')}"
    return why_unavailable(query.device) or _disagrees(
        query.device, query.dtype, query.shape[-1], value.shape[-1], softcap
    )


@functools.cache
def _disagrees(device: torch.device, dtype: torch.dtype, width: int, value_width: int, softcap: float | None) -> str:
    """Compiles and runs: the answer of the first layer of a kind is that of all."""
    try:
        # On a thread of its own: a graph, a recomputation, hooks and modes that are under way here are not there.
        with threads_on_this_device(1) as thread:
            error = thread.submit(flex_error, device, dtype, width, value_width, softcap).result()
    except Exception as failure:  # a compiler's failures have no common class
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    limit = _PROBE_ERROR.get(dtype, _PROBE_ERROR_BELOW)
    return f"it differs from the definition by {error:.1e}" if not error <= limit else ""


def flex_error(device: torch.device, dtype: torch.dtype, width: int, value_width: int, softcap: float | None) -> float:
    """Largest relative error of outputs and gradients against the definition in float64: three documents in a row that
    is no multiple of a block, grouped heads, a sink, with a window."""
    lengths, scale, window = (90, 40, 170), width**-0.5, 100
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 4, width), (300, 2, width), (300, 2, value_width), (4,))
    leaves = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    visible = _visible(*_of_documents(cu, 300, window))
    query, key, value, sink_H = leaves
    got, _ = attend(query, key, value, sink_H, visible, scale, softcap)
    query, key, value, sink_H = exact
    want = defined(query, key, value, sink_H, visible, scale, softcap)
    grads = torch.autograd.grad(got.double().square().sum(), leaves)
    wanted = torch.autograd.grad(want.square().sum(), exact)
    pairs = [(got.detach(), want.detach()), *zip(grads, wanted, strict=True)]
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
    """`[N, H, V]` by the formula, tokens x tokens: what `attend` is compared with."""
    group = query_NHD.shape[1] // key_MKD.shape[1]
    scores_HNM = torch.einsum("nhd,mhd->hnm", query_NHD, key_MKD.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores_HNM = softcap * torch.tanh(scores_HNM / softcap)
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


@torch.compiler.disable
def of_batch(
    cu: Tensor | None,
    rows: int,
    length: int,
    window: int | None,
    device: torch.device,
    seen: SeenKeys | None = None,
) -> Visible:
    """Of whole documents. Made once for a microbatch's `cu` (by identity) and window; nothing is read on the host."""
    if cu is None:
        return _of_rows(rows, length, window, device)
    known = _of_bounds.setdefault(id(cu), (weakref.ref(cu, _forget(id(cu))), {}))[1]
    if (rows * length, window) not in known:
        prefix = None if seen is None else _of_prefixes(cu, seen, rows * length, window)
        known[rows * length, window] = _visible(*_of_documents(cu, rows * length, window), prefix)
    return known[rows * length, window]


_of_bounds: dict[int, tuple[weakref.ref[Tensor], dict[tuple[int, int | None], Visible]]] = {}


def _forget(key: int) -> Callable[[object], None]:
    return lambda _, known=_of_bounds: known.pop(key, None)  # type: ignore[misc]


@functools.lru_cache(maxsize=16)
def _of_rows(rows: int, length: int, window: int | None, device: torch.device) -> Visible:
    cu = torch.arange(0, rows * length + 1, length, device=device)
    return _visible(*_of_documents(cu, rows * length, window))


@torch.compiler.disable
@functools.lru_cache(maxsize=64)
def of_context(context: Context, window: int | None, of_rank: int | None = None) -> Visible:
    """Of this rank's queries and the gathered keys of all ranks, or those of one."""
    index_M = context.gathered_index()
    cu = torch.tensor(context.bounds, device=index_M.device)
    position, lower, _ = _of_documents(cu, len(index_M), window)
    own_N = context.whole_index()
    key_position_M = torch.empty_like(position)
    key_position_M[index_M] = position
    if of_rank is not None:
        key_position_M = key_position_M.unflatten(0, (context.group.size, -1))[of_rank].contiguous()
    return _visible(position[own_N], lower[own_N], key_position_M)


def _of_documents(cu: Tensor, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Position, lowest position that is seen, and key position of each token of documents one after another."""
    position, document = _document_of(cu, num_tokens)
    lower = cu[document].to(torch.int32)
    if window is not None:
        lower = torch.maximum(lower, position - (window - 1))
    return position, lower, position


def _document_of(cu: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Position of each token, and the document that it is in."""
    position = torch.arange(num_tokens, dtype=torch.int32, device=cu.device)
    return position, torch.searchsorted(cu[1:].contiguous(), position.to(cu.dtype), right=True)


def _of_prefixes(cu: Tensor, seen: SeenKeys, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor]:
    """First and end position of what each token sees of its document's prefix; (largest integer, 0) for nothing."""
    position, document = _document_of(cu, num_tokens)
    start, length = (x[document] for x in seen.prefixes(cu))
    first, stop = start, start + length
    if window is not None:  # of the W tokens up to itself, those that are not in its own document
        first = torch.maximum(start, stop - (window - 1) + (position - cu[document]))
    nothing = first >= stop
    first = first.masked_fill(nothing, torch.iinfo(torch.int32).max)
    return first.to(torch.int32), stop.masked_fill(nothing, 0).to(torch.int32)


def _visible(
    position_N: Tensor, lower_N: Tensor, key_position_M: Tensor, prefix: tuple[Tensor, Tensor] | None = None
) -> Visible:
    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = key_position_M[key]
        own = (at <= position_N[query]) & (at >= lower_N[query])
        return own if prefix is None else own | ((at >= prefix[0][query]) & (at < prefix[1][query]))

    first, last = _ends(position_N)
    least, most = _ends(lower_N)
    key_first, key_last = (x[None] for x in _ends(key_position_M))
    touched = (key_last >= least[:, None]) & (key_first <= last[:, None])
    # a block at the end may be padding in part, which only the mask knows
    whole_Q, whole_K = (torch.arange(1, len(x) + 1, device=x.device) * _BLOCK for x in (first, key_first[0]))
    inside = (whole_Q <= len(position_N))[:, None] & (whole_K <= len(key_position_M))
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
    """Smallest and largest of each block; the last one's remainder repeats its last."""
    padded = torch.cat([x, x[-1:].expand(-len(x) % _BLOCK)]).view(-1, _BLOCK)
    return padded.amin(1), padded.amax(1)


def _listed(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each run of queries meets, and which: those first."""
    order_QK = blocks_QK.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks_QK.sum(1, dtype=torch.int32)[None, None], order_QK.to(torch.int32)[None, None]
