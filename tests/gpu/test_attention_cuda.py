"""The CUDA path of packed attention against the dense definition in fp32: sinks, windows, grouped heads, wide keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from automodel_cli.data.batch import SeenKeys
from automodel_cli.models.attention import kernel_probes, kernel_selection
from automodel_cli.models.attention.dense import dense, visible_mask
from automodel_cli.models.attention.packed import packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("value_width", [64, 32])
def test_flash_varlen_equals_dense(window: int | None, with_sink: bool, value_width: int):
    torch.manual_seed(0)
    lengths = (100, 156, 200, 56)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    query = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    value = torch.randn(2, 2, 256, value_width, device="cuda", dtype=torch.bfloat16)
    sink = torch.randn(8, device="cuda") if with_sink else None
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sink) if tensor is not None]
    weights = torch.randn(2, 256, 8, value_width, device="cuda")

    out, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, 0.125, 0.0, window, None, sink, cu, max(lengths)
    )
    got = torch.autograd.grad((out.float() * weights).sum(), leaves)

    rows = []
    for row, (first, second) in enumerate((lengths[:2], lengths[2:])):
        assert first + second == 256
        parts = []
        for tokens in (slice(0, first), slice(first, 256)):
            q = query[row : row + 1, :, tokens].float()
            k, v = (x[row : row + 1, :, tokens].float().repeat_interleave(4, 1) for x in (key, value))
            mask = visible_mask(q.shape[2], (q.shape[2],), (0,), window, q.dtype, q.device)
            parts.append(dense(q, k, v, mask, sink_H=sink, scale=0.125).transpose(1, 2))
        rows.append(torch.cat(parts, 1))
    expected = torch.cat(rows)
    want = torch.autograd.grad((expected * weights).sum(), leaves)
    assert (out.float() - expected).abs().max() < 2e-2
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).float().norm() < 2e-2 * theirs.float().norm()


@pytest.mark.parametrize("window", [None, 64])
def test_documents_that_share_a_prefix_equal_whole_ones(window: int | None):
    torch.manual_seed(0)
    bounds, prefixes = (0, 90, 140, 256), ((0, 0), (0, 90), (0, 90))
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    seen = SeenKeys.of(bounds, prefixes)
    shapes = ((1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64))
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    weights = torch.randn(1, 256, 8, 64, device="cuda")
    out, _ = packed_attention(
        *(torch.nn.Module(), *leaves, None, 0.125, 0.0, window, None, None, cu, 116),
        cu_seq_lens_k=seen.cu_seqlens.cuda(),
        max_length_k=seen.max_seqlen,
        key_index=seen.index_M.cuda(),
    )
    parts = []
    for (start, end), (first, length) in zip(pairwise(bounds), prefixes, strict=True):
        index = torch.tensor([*range(first, first + length), *range(start, end)], device="cuda")
        query, key, value = (x[:, :, index].float() for x in leaves)
        mask = visible_mask(len(index), (len(index),), (0,), window, query.dtype, query.device)
        whole = dense(query, key.repeat_interleave(4, 1), value.repeat_interleave(4, 1), mask, scale=0.125)
        parts.append(whole.transpose(1, 2)[:, length:])
    expected = torch.cat(parts, 1)
    assert (out.float() - expected).abs().max() < 2e-2
    got, want = (torch.autograd.grad((x.float() * weights).sum(), leaves) for x in (out, expected))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).float().norm() < 2e-2 * theirs.float().norm()


def test_attention_of_cudnn_equals_dense_in_many_shapes():
    """Each shape has a plan of its own. The choice at the start of a run compares one of them."""
    device = torch.device("cuda")
    if reason := kernel_selection._why_not_cudnn(device):
        pytest.skip(reason)
    for lengths in ((300,), (1000, 24), (129, 64, 7, 3, 500), (4096, 4096)):
        for width in (64, 128):
            assert kernel_probes.cudnn_error(device, lengths, width) < 2e-2, (lengths, width)
