"""Documents that share a prefix: what each gets is what it would get with a copy of the prefix of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from automodel_cli.data.batch import SeenKeys
from automodel_cli.models.attention import dense, kernel_selection
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.attention.packed import packed_attention
from tests.unit.models.attention.test_flex import alone

CPU = torch.device("cpu")
ROWS, TOKENS = 2, 40
# Two rows: a prefix and three documents that see it, a document for itself, padding; a prefix, two documents, padding
BOUNDS = (0, 7, 12, 21, 27, 37, 40, 60, 61, 73, 80)
NONE = (0, 0)
PREFIXES = (NONE, (0, 7), (0, 7), (0, 7), NONE, NONE, NONE, (40, 20), (40, 20), NONE)
SEEN = SeenKeys.of(BOUNDS, PREFIXES)
CU = torch.tensor(BOUNDS, dtype=torch.int32)


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value narrower than the key, and sinks; grouped heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, 4, TOKENS, 12), (ROWS, 2, TOKENS, 12), (ROWS, 2, TOKENS, 6), (4,))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def whole_documents(tensors: list[Tensor], sink: Tensor | None, window: int | None, cap: float | None) -> Tensor:
    """Each document by the definition, behind a copy of its prefix; `[N, H, V]`."""
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in tensors[:3])
    parts = []
    for (start, end), (first, length) in zip(pairwise(BOUNDS), PREFIXES, strict=True):
        index = torch.cat([torch.arange(first, first + length), torch.arange(start, end)])
        parts.append(alone(query[index], key[index], value[index], sink, window, cap, 0.4)[length:])
    return torch.cat(parts)


@pytest.mark.parametrize("short_row", [192, 0])
@pytest.mark.parametrize(
    ("kernel", "window", "cap", "sinks", "tolerance"),
    [
        ("auto", None, None, False, 1e-12),
        ("auto", None, None, True, 5e-6),
        ("auto", 9, None, False, 1e-12),
        ("auto", 9, None, True, 5e-6),  # sinks, and scores of the dense definition, are float32
        ("auto", 30, 5.0, True, 5e-6),
        ("flex", 9, 5.0, True, 5e-6),
    ],
)
def test_a_document_and_the_prefix_that_it_shares_are_that_document_whole(
    kernel, window, cap, sinks, tolerance, short_row, monkeypatch
):
    """Outputs, and gradients of queries, keys, values and sinks: those of the prefix come from all of its documents,
    where rows are taken as they lie and where documents are put together."""
    monkeypatch.setattr(segments, "_SHORT_ROW", short_row)
    segments.row_mask.cache_clear()
    kernel_selection.choose_kernel(kernel, CPU)
    try:
        tensors = leaves() if sinks else leaves()[:3]
        sink = tensors[3] if sinks else None
        got, _ = packed_attention(
            *(torch.nn.Module(), *tensors[:3], None, 0.4, 0.0, window, cap, sink, CU),
            cu_seq_lens_k=SEEN.cu_seqlens,
            max_length_k=SEEN.max_seqlen,
            key_index=SEEN.index_M,
        )
    finally:
        kernel_selection.choose_kernel("auto", CPU)
    want = whole_documents(tensors, sink, window, cap)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=0, atol=tolerance)
    grads, wanted = (torch.autograd.grad((x * weights).sum(), tensors) for x in (got.flatten(0, 1), want))
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 9])
def test_the_mask_of_short_rows_shows_each_document_and_its_prefix_through_the_window(window):
    """Token by token, by the definition."""
    mask_B1TT = segments.row_mask(segments.HostDocuments(BOUNDS, PREFIXES), TOKENS, window, torch.float32, CPU)
    assert mask_B1TT is not None
    sees = torch.zeros(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool)
    for (start, end), (first, length) in zip(pairwise(BOUNDS), PREFIXES, strict=True):
        document = [*range(first, first + length), *range(start, end)]
        for place in range(length, len(document)):
            for key in document[max(0, place - window + 1) if window else 0 : place + 1]:
                sees[document[place] // TOKENS, 0, document[place] % TOKENS, key % TOKENS] = True
    assert torch.equal(mask_B1TT, torch.zeros(sees.shape).masked_fill(~sees, -torch.inf))


def test_long_rows_and_prefixes_in_another_row_have_no_mask():
    long, half = segments.HostDocuments((0, 100, 193)), segments.HostDocuments((0, 40, 80), (NONE, (0, 40)))
    assert segments.row_mask(long, 193, None, torch.float32, CPU) is None
    assert segments.row_mask(half, 40, None, torch.float32, CPU) is None
    got, _ = packed_attention(
        *(torch.nn.Module(), *leaves()[:3], None, 0.4, 0.0, None, None, None, torch.tensor([0, 40, 80])),
        cu_seq_lens_k=torch.tensor([0, 40, 120]),
        max_length_k=80,
        key_index=SeenKeys.of(half.bounds, half.prefixes).index_M,
    )
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in leaves()[:3])
    want = alone(query, key, value, None, None, None, 0.4)  # the second row goes on where the first ends
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=0, atol=1e-12)


def test_one_variable_length_call_on_cuda_gets_the_keys_of_each_document_after_its_prefix():
    plan = segments.batch_varlen(CU, 20, ROWS, TOKENS, CPU, SEEN)
    assert plan.key_index is not None and (plan.max_q, plan.max_k) == (20, 32)
    for document, (start, end) in enumerate(pairwise(BOUNDS)):
        first, length = PREFIXES[document]
        keys = plan.key_index[plan.cu_k[document] : plan.cu_k[document + 1]].tolist()
        assert keys == [*range(first, first + length), *range(start, end)]
        assert plan.cu_q[document : document + 2].tolist() == [start, end]


def operator() -> torch.library.Library:
    """aten's variable-length flash attention for the CPU, by the definition."""

    def segments_of(cu_q, cu_k, left, q, k, v):
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            rows = (q[a:b], *(x[c:d].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)))
            ahead, window = (d - c) - (b - a), None if left is None else left + 1
            mask = dense.visible_mask(b - a, (d - c,), (ahead,), window, torch.float32, CPU)
            yield slice(a, b), slice(c, d), [x.transpose(0, 1)[None] for x in rows], mask

    def forward(q, k, v, cu_q, cu_k, *arguments, scale, window_size_left=None, window_size_right=None):
        out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], q.shape[0])
        for at, _, qkv, mask in segments_of(cu_q, cu_k, window_size_left, q, k, v):
            one, one_lse = dense.dense_forward(*qkv, mask, scale, None)
            out[at], lse[:, at] = one[0].transpose(0, 1), one_lse[0]
        nothing = torch.zeros(2, dtype=torch.uint64)
        return out, lse, nothing, nothing[0].clone(), torch.empty(0)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, *arguments, scale, window_size_left=None, window_size_right=None):
        dq, dk, dv = grads = [torch.zeros_like(x) for x in (q, k, v)]
        for at, of_keys, qkv, mask in segments_of(cu_q, cu_k, window_size_left, q, k, v):
            rows = [x[at].transpose(0, 1)[None] for x in (grad, out)]
            found = dense.dense_backward(rows[0], *qkv, mask, rows[1], lse[None, :, at], scale, None)
            for whole, tokens, of_heads in zip(grads, (at, of_keys, of_keys), found, strict=True):
                whole[tokens] = of_heads[0].unflatten(0, (whole.shape[1], -1)).sum(1).transpose(0, 1)
        return dq, dk, dv

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


@pytest.mark.parametrize("window", [None, 9])
def test_the_variable_length_call_gives_whole_documents_and_keeps_no_copy_of_a_prefix(window: int | None):
    """On a stand-in for CUDA's operator, in float32."""
    tensors, exact = leaves(torch.float32), leaves()
    kept: list[tuple[int, ...]] = []
    library = operator()
    try:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in tensors[:3]]
        plan = segments.batch_varlen(CU, 20, ROWS, TOKENS, CPU, SEEN)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
            got = kernels.varlen_cuda(*flat, plan, tensors[3], 0.4, window, pads=False)
        want = whole_documents(exact, exact[3], window, None)
        weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad((got * weights).sum(), tensors)
    finally:
        library._destroy()
    assert (ROWS * TOKENS, 2, 12) in kept and (len(SEEN.index_M), 2, 12) not in kept
    wanted = torch.autograd.grad((want * weights).sum(), exact)
    for ours, theirs in zip((got, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)


def test_gradients_of_a_key_that_many_see_are_summed_in_float32():
    """bfloat16 would stop at 256."""
    key = torch.zeros(3, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([1] * 512)
    kernels.picked(key, index).backward(torch.ones(512, 1, 1, dtype=torch.bfloat16))
    assert key.grad is not None and key.grad.flatten().tolist() == [0.0, 512.0, 0.0]


def test_what_is_seen_says_where_each_prefix_is():
    first, length = SEEN.prefixes(CU)
    found = [run if run[1] else NONE for run in zip(first.tolist(), length.tolist(), strict=True)]
    assert found == list(PREFIXES)
    with_an_empty_one = SeenKeys.of((0, 2, 4, 4), (NONE, (0, 2), NONE))
    assert with_an_empty_one.prefixes(torch.tensor([0, 2, 4, 4]))[1].tolist() == [0, 2, 0]
