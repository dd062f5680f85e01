"""Attention with torch's FlexAttention: soft caps, fp32 and head widths that flash kernels do not support. O(tokens)
memory.

The compiled kernel receives the blocks that queries see (`flex_visibility.py`) as data. Other boundaries need no
recompilation. A sink is a term of the log-sum-exp L: O' = O sigmoid(L - sink).

On CUDA, torch compiles to Triton kernels. The first use of each head width, dtype and soft cap compares them with the
definition. On a CPU, the same graph uses the dense definition: slow, exact, for tests. The kernels have NEVER been run
on a GPU.

Shapes: N queries, M keys, H heads, K KV heads, D and V widths of keys and values.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from automodel_cli.data.batch import SeenKeys
from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.distributed.typed_torch import disable
from automodel_cli.models import torch_compat
from automodel_cli.models.attention.flex_visibility import (
    Visible,
    batch_visibility,
    context_visibility,
    document_positions,
    visible_intervals,
)
from automodel_cli.models.context_parallel_layout import Context

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
