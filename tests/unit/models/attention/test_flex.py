"""FlexAttention against the definition in float64: each document alone, every block of its mask, and how often it is
compiled. On the CPU, where torch runs the operator's dense form; the sparse kernel of torch's compiler once, slow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import SeenKeys
from automodel_cli.models.attention import flash_support, flex_visibility, kernel_selection
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.context_parallel_layout import Context, OneProcess
from tests import tiny
from tests.errors import raises

CPU = torch.device("cpu")
ROWS, TOKENS = 2, 150
FIRST = (0, 7, 100, 150, 290, 300)


@pytest.fixture
def flex() -> Iterator[None]:
    kernel_selection.choose_kernel("flex", CPU)
    yield
    kernel_selection.choose_kernel("auto", CPU)


def alone(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, window: int | None, cap: float | None, scale: float
) -> Tensor:
    """The definition for one document, `[n, heads, width]` each."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(group, 1)) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    gap = torch.arange(len(query))[:, None] - torch.arange(len(query))
    weights = scores.exp() * ((gap >= 0) & (gap < (window or len(query))))
    total = weights.sum(-1) + (0 if sink is None else sink.exp()[:, None])
    return torch.einsum("hij,jhv->ihv", weights / total[..., None], value.repeat_interleave(group, 1))


def _documents_alone(tensors: list[Tensor], sink, bounds, window, cap, scale) -> Tensor:
    flat = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
    parts = [alone(*(x[a:b] for x in flat), sink, window, cap, scale) for a, b in pairwise(bounds)]
    return torch.cat(parts).unflatten(0, (ROWS, TOKENS))


@pytest.mark.usefixtures("flex")
def test_a_packed_row_is_its_documents_alone_and_other_bounds_compile_nothing():
    """Soft cap, window, sinks, scale, grouped heads and values narrower than keys; then the same graph for other
    documents, another window, and rows that are one document each."""
    generator = torch.Generator().manual_seed(0)
    before = len(attention_flex.compilations)
    for bounds, window in ((FIRST, 33), ((0, 1, 2, 128, 150, 151, 300), None), (None, 140)):
        shapes = ((ROWS, 4, TOKENS, 12), (ROWS, 2, TOKENS, 12), (ROWS, 2, TOKENS, 6), (4,))
        leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
        cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        got, _ = packed_attention(
            torch.nn.Module(), *leaves[:3], None, 0.4, 0.0, window, 5.0, leaves[3], cu_seq_lens_q=cu
        )
        want = _documents_alone(leaves[:3], leaves[3], bounds or (0, 150, 300), window, 5.0, 0.4)
        weights = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
        grads, wanted = (torch.autograd.grad((x * weights).sum(), leaves) for x in (got, want))
        for ours, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # torch keeps gradients of L in float32
    assert len(attention_flex.compilations) - before == 1


def _sees(visible: flex_visibility.Visible) -> Tensor:
    key_M = visible.key_position_M
    own = (key_M <= visible.position_N[:, None]) & (key_M >= visible.lower_N[:, None])
    if visible.prefix is None:
        return own
    return own | (key_M >= visible.prefix[0][:, None]) & (key_M < visible.prefix[1][:, None])


def _in_blocks(x: Tensor) -> Tensor:
    n, m = x.shape
    padded = torch.zeros(-(-n // 128) * 128, -(-m // 128) * 128, dtype=torch.bool)
    padded[:n, :m] = x
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)


def _table(count: Tensor, index: Tensor) -> Tensor:
    taken = torch.arange(index.shape[-1]) < count[0, 0][:, None]
    return torch.zeros_like(index[0, 0], dtype=torch.int64).scatter_add_(1, index[0, 0].long(), taken.long()) > 0


@pytest.mark.parametrize("window", [None, 1, 100, 128, 500])
@pytest.mark.parametrize("bounds", [(0, 1100), (0, 128, 256, 1000, 1100), (0, 3, 3, 300, 301, 640, 1100)])
def test_blocks_are_skipped_only_where_nothing_is_seen_and_whole_only_where_all_is(bounds, window):
    cu = torch.tensor(bounds, dtype=torch.int32)
    visible = flex_visibility.batch_visibility(cu, 1, 1100, window, CPU)
    document = torch.bucketize(torch.arange(1100), cu[1:], right=True)
    gap = torch.arange(1100)[:, None] - torch.arange(1100)
    want = (gap >= 0) & (gap < (window or 1100)) & (document[:, None] == document)
    assert torch.equal(_sees(visible), want)
    blocks = visible.blocks
    partial, full = (
        _table(blocks.kv_num_blocks, blocks.kv_indices),
        _table(blocks.full_kv_num_blocks, blocks.full_kv_indices),
    )
    assert torch.equal(full, _in_blocks(want).all(-1))
    assert torch.equal(partial, _in_blocks(want).any(-1) & ~full)
    assert torch.equal(partial.T, _table(blocks.q_num_blocks, blocks.q_indices))
    assert visible.computed_pairs() == int((partial | full).sum()) * 128**2


@pytest.mark.parametrize("window", [None, 1, 100, 500])
def test_blocks_of_documents_that_share_a_prefix_hold_all_that_is_seen(window: int | None):
    bounds = (0, 300, 500, 510, 900, 1000, 1100)
    prefixes = ((0, 0), (0, 300), (0, 300), (0, 300), (0, 0), (900, 100))
    cu = torch.tensor(bounds, dtype=torch.int32)
    visible = flex_visibility.batch_visibility(cu, 1, 1100, window, CPU, SeenKeys.of(bounds, prefixes))
    want = torch.zeros(1100, 1100, dtype=torch.bool)
    for (start, end), (first, length) in zip(pairwise(bounds), prefixes, strict=True):
        keys = torch.cat([torch.arange(first, first + length), torch.arange(start, end)])
        gap = torch.arange(length, length + end - start)[:, None] - torch.arange(len(keys))
        want[start:end, keys] = (gap >= 0) & (gap < (window or 1100))
    assert torch.equal(_sees(visible), want)
    blocks = visible.blocks
    full = _table(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    partial = _table(blocks.kv_num_blocks, blocks.kv_indices)
    assert not (_in_blocks(want).any(-1) & ~(partial | full)).any()
    assert not (full & ~_in_blocks(want).all(-1)).any() and not (full & partial).any()
    assert (partial | full).sum() <= _in_blocks(want).any(-1).sum() + 4


def test_blocks_of_shared_rows_hold_all_that_is_seen():
    """Chunks of 150 tokens: no multiple of a block, so that some blocks hold keys of two places."""

    class Group(OneProcess):
        size = 2

    context = Context(Group(), (2, 600), torch.tensor([0, 200, 600, 610, 1200]), CPU)
    for source in (None, 0, 1):
        visible = flex_visibility.context_visibility(context, 90, source)
        blocks = visible.blocks
        full = _table(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        touched = _table(blocks.kv_num_blocks, blocks.kv_indices) | full
        sees = _in_blocks(_sees(visible))
        assert not (sees.any(-1) & ~touched).any()
        assert not (full & ~sees.all(-1)).any()
        assert touched.float().mean() < 0.6


def test_layers_share_a_mask_for_as_long_as_its_microbatch_lives():
    cu = torch.tensor([0, 50, 128], dtype=torch.int32)
    first = flex_visibility.batch_visibility(cu, 1, 128, None, CPU)
    assert flex_visibility.batch_visibility(cu, 1, 128, None, CPU) is first
    assert flex_visibility.batch_visibility(cu, 1, 128, 8, CPU) is not first
    known, key = flex_visibility._visibility_cache, id(cu)
    assert key in known
    del cu
    gc.collect()
    assert key not in known


def test_the_first_comparison_finds_a_kernel_that_forgets_the_soft_cap(monkeypatch: pytest.MonkeyPatch):
    assert attention_flex.flex_error(CPU, torch.bfloat16, 16, 8, 2.0) < 1e-2

    def forgets(query, key, value, sink, visible, scale, softcap):
        return attention_flex.defined(query, key, value, sink, visible, scale, None), torch.empty(0)

    monkeypatch.setattr(attention_flex, "_stand_in", forgets)
    assert attention_flex.flex_error(CPU, torch.bfloat16, 16, 8, 2.0) > 0.1


def test_flex_by_name_is_refused_without_a_kernel_for_the_device():
    with raises(ConfigError, "kernel_unavailable", keys=("model.attention_kernel",), values=("flex", "CUDA", "meta")):
        kernel_selection.choose_kernel("flex", torch.device("meta"))


@pytest.mark.slow
def test_the_sparse_kernel_of_torchs_compiler_reads_the_same_blocks():
    """Forward only: torch has no other for the CPU."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, 300, 32, generator=generator) for h in (4, 2, 2))
    cu = torch.tensor(FIRST, dtype=torch.int32)
    kernel = torch.compile(flex_attention, fullgraph=True)
    for window in (None, 40):
        visible = flex_visibility.batch_visibility(cu, ROWS, TOKENS, window, CPU)
        with torch.no_grad():
            got = kernel(query, key, value, block_mask=visible.blocks, scale=0.3, enable_gqa=True)
        flat = [x[0].transpose(0, 1).double() for x in (query, key, value)]
        want = torch.cat([alone(*(x[a:b] for x in flat), None, window, None, 0.3) for a, b in pairwise(FIRST)])
        torch.testing.assert_close(got[0].transpose(0, 1).double(), want, rtol=0, atol=1e-5)


def test_models_whose_layers_no_flash_kernel_takes_are_known_without_running_them() -> None:
    """A whole layer in one graph cannot hold FlexAttention, so a run must know before its first step."""
    wide, capped = {"head_dim": 64}, {"attn_logit_softcapping": 30.0}
    found = {
        (family, dtype): flash_support.why_no_flash_on_cuda(tiny.build_hf(family, **fields), dtype)
        for family, fields in (("llama", wide), ("gemma2", {**wide, **capped}))
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert found["llama", torch.bfloat16] == ""
    assert found["llama", torch.float32].startswith("float32")
    assert found["gemma2", torch.bfloat16] == found["gemma2", torch.float32] == "soft caps (here 30)"
