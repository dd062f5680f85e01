"""Shares of rows without a process group: which queries meet which keys, and which models may share rows at all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, dual_chunks
from automodel_cli.models.attention import dense, kernel_selection, ring_calls
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import ring as ring
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.attention.packed import packed_attention, register_packed_attention
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.packing_support import probe_context
from tests.errors import raises
from tests.tiny import FAMILIES, build_hf, packed_batch, tiny_config, token_row

LENGTHS = (3, 10, 1, 9, 20, 3)  # of documents in two rows of 23 tokens: no multiple of 2 * cp
ROWS, TOKENS = 2, 23
BOUNDS = torch.tensor([0, 3, 13, 14, 23, 43, 46], dtype=torch.int32)


class Exchange:
    """One rank of several that have already said what they will send."""

    def __init__(self, rank: int, size: int, blocks: list[Tensor], *, ring: bool):
        self.rank, self.size, self.ring, self._blocks, self._turn = rank, size, ring, blocks, 0

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._blocks) if self._blocks else x

    gather_results = gather

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        self._turn += 1
        source = (self.rank - self._turn) % self.size
        return lambda: self._blocks[source]


def context_of(rank: int, size: int, blocks: list[Tensor] | None = None, *, ring: bool = False) -> Context:
    return Context(Exchange(rank, size, blocks or [], ring=ring), (ROWS, TOKENS), BOUNDS, torch.device("cpu"))


def test_chunks_are_an_early_one_and_its_mirror_image():
    assert dual_chunks(2) == ((0, 3), (1, 2))
    assert dual_chunks(4) == ((0, 7), (1, 6), (2, 5), (3, 4))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_put_together_are_the_rows(size: int):
    column = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    shares = [context_of(rank, size).local(column, -1) for rank in range(size)]
    assert len({share.shape for share in shares}) == 1
    assert torch.equal(context_of(0, size, shares).gather_rows(shares[0]), column)


def test_padding_is_a_document_of_its_own():
    context = context_of(0, 2)
    assert context.tokens == 24
    assert context.bounds == (0, 3, 13, 14, 23, 24, 44, 47, 48)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).view(ROWS, TOKENS)
    assert context_of(0, 1).local_positions(positions)[0, -1] == 0


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_segments_are_causal_attention_within_documents(size: int, window: int | None):
    """Every (query, key) of the definition on exactly one rank, with all keys and chunk by chunk, and nothing else."""
    document = torch.bucketize(torch.arange(48), torch.tensor(context_of(0, 2).bounds), right=True)
    want = {
        (q, k) for q, k in product(range(48), repeat=2) if 0 <= q - k < (window or 99) and document[q] == document[k]
    }
    for chunks in ([None], list(range(2 * size))):
        seen: list[tuple[int, int]] = []
        for rank in range(size):
            context = context_of(rank, size)
            token = torch.arange(48).view(ROWS, 24)[:, context._local_t].flatten().tolist()
            for chunk in chunks:
                for s in segments.context_segments(context, window, chunk):
                    for i, j in product(range(s.num_queries), range(s.num_keys)):
                        if i + s.ahead - (window or 99) < j <= i + s.ahead:
                            seen.append((token[s.query + i], s.key + j))
        assert len(seen) == len(want) and set(seen) == want


def reference(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, window: int | None, cap: float | None):
    """Document by document from the definition: `[N, H, V]`."""
    outputs = []
    for a, b in pairwise(BOUNDS.tolist()):
        gap = torch.arange(b - a)[:, None] - torch.arange(b - a)
        hidden = (gap < 0) | (gap >= (window or 99))
        mask = torch.zeros(gap.shape).masked_fill(hidden, float("-inf"))
        q, k, v = (x[a:b].transpose(0, 1)[None] for x in (query, key, value))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        outputs.append(dense.dense(q, k, v, mask, sink_H=sink, scale=0.3, softcap=cap)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["plain", "sink", "softcap", "wide"])
@pytest.mark.parametrize("how", ["all_gather", "ring"])
def test_shared_attention_is_the_definition(how: str, kind: str, window: int | None, size: int):
    """Forward, and the gradient of this rank's queries and sinks: what needs no other rank's backward."""
    _check_shared(how, kind, window, size)


def test_a_ring_of_flex_attention_is_the_definition():
    kernel_selection.choose_kernel("flex", torch.device("cpu"))
    try:
        _check_shared("ring", "both", 4, 4)
    finally:
        kernel_selection.choose_kernel("auto", torch.device("cpu"))


def _check_shared(how: str, kind: str, window: int | None, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    width = 24 if kind == "wide" else 16
    q, k, v = (torch.randn(ROWS * TOKENS, h, d, generator=generator) for h, d in ((4, 16), (2, 16), (2, width)))
    sink = torch.randn(4, generator=generator) if kind in ("sink", "both") else None
    cap = 2.0 if kind in ("softcap", "both") else None
    weights = torch.randn(ROWS * TOKENS, 4, width, generator=generator)
    leaves = [x.requires_grad_() for x in (q, sink) if x is not None]
    want = reference(q, k, v, sink, window, cap)
    want_grads = torch.autograd.grad((want * weights).sum(), leaves)

    whole = [context_of(rank, size) for rank in range(size)]

    def share(x: Tensor, rank: int) -> Tensor:
        """`[B, h, t, d]` with zeros in the padding."""
        rows = x.view(ROWS, TOKENS, *x.shape[1:])
        pad = rows.new_zeros(ROWS, whole[rank].tokens - TOKENS, *x.shape[1:])
        return torch.cat([rows, pad], 1)[:, whole[rank]._local_t].transpose(1, 2)

    flat = [[share(x, r).transpose(1, 2).flatten(0, 1) for x in (k, v)] for r in range(size)]
    if how == "ring":
        blocks = [torch.stack(kernels.pad_to_one_width(pair[0], *pair)[1:]) for pair in flat]
    else:
        blocks = [torch.cat(pair, -1) for pair in flat]
    outputs = []
    for rank in range(size):
        context = context_of(rank, size, blocks, ring=how == "ring")
        q_BHtD, k_BKtD, v_BKtV = (share(x, rank) for x in (q, k, v))
        out, _ = packed_attention(
            torch.nn.Module(), q_BHtD, k_BKtD, v_BKtV, None, 0.3, 0.0, window, cap, sink, context=context
        )
        outputs.append(out)
    got = context_of(0, size, outputs).gather_rows(outputs[0]).flatten(0, 1)
    assert torch.allclose(got, want, atol=2e-6)
    if how == "all_gather":
        for ours, theirs in zip(torch.autograd.grad((got * weights).sum(), leaves), want_grads, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("size", [2, 4])
def test_one_variable_length_call_is_the_definition(size: int, window: int | None):
    """What the CUDA kernel is given, run as that kernel is documented: causal masks aligned at the end."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(ROWS * 24, 2, 8, generator=generator) for _ in range(3))
    bounds = context_of(0, 2).bounds
    for rank in range(size):
        context = context_of(rank, size)
        order = torch.cat(
            [torch.arange(48).view(ROWS, 24)[:, context_of(r, size)._local_t].flatten() for r in range(size)]
        )
        mine = order.view(size, -1)[rank]
        plan = segments.context_varlen(context, window)
        assert plan.key_index is not None
        got = by_definition(q[mine], k[order][plan.key_index], v[order][plan.key_index], plan, 0, window)
        for token, out in zip(mine.tolist(), got, strict=True):
            start = max(b for b in bounds if b <= token)
            first = start if window is None else max(start, token - window + 1)
            seen = slice(first, token + 1)
            probs = torch.einsum("hd,khd->hk", q[token], k[seen]).softmax(-1)
            assert torch.allclose(out, torch.einsum("hk,khd->hd", probs, v[seen]), atol=1e-6)


def by_definition(q: Tensor, k: Tensor, v: Tensor, plan: kernels.VarlenPlan, right: int, window: int | None) -> Tensor:
    outputs = []
    for (a, b), (c, d) in zip(pairwise(plan.cu_q.tolist()), pairwise(plan.cu_k.tolist()), strict=True):
        assert b - a <= plan.max_q and d - c <= plan.max_k
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        visible = (distance >= -right) & (distance < (window or 99) - right)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]).masked_fill(~visible, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[c:d]))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 4])
def test_variable_length_calls_of_a_ring_cover_what_the_segments_say(window: int | None):
    """(query, key) pairs of the masks that flash attention is given, against those of the segments."""
    for rank, chunk in product(range(2), range(4)):
        context = context_of(rank, 2)
        members = segments.context_segments(context, window, chunk)
        place = context.gathered_index() % 24
        want = [
            (s.query + i, place[s.key + j].item())
            for s in members
            for i, j in product(range(s.num_queries), range(s.num_keys))
            if i + s.ahead - (window or 99) < j <= i + s.ahead
        ]
        seen = []
        for call in ring_calls._varlen_calls(members, place, window) if members else []:
            assert isinstance(call, ring_calls._VarlenCall)
            assert len(set(call.query_index.tolist())) == len(call.query_index)
            left, right = call._left, 0 if call._causal else call._right
            plan = call._plan
            for (a, b), (c, d) in zip(pairwise(plan.cu_q.tolist()), pairwise(plan.cu_k.tolist()), strict=True):
                for i, j in product(range(b - a), range(d - c)):
                    aligned = i + (d - c) - (b - a)
                    if (left is None or j >= aligned - left) and (right is None or j <= aligned + right):
                        seen.append((call.query_index[a + i].item(), call.key_index[c + j].item()))
        assert sorted(seen) == sorted(want)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_may_be_shared(family: str):
    probe_context(tiny_config(family))


@pytest.mark.parametrize("family", ["bloom"])
def test_models_that_mix_tokens_elsewhere_are_refused(family: str):
    with raises(ConfigError, "not_supported_by_model", keys=("mesh.cp_size",), values=(family,), fix="mesh.cp_size=1"):
        probe_context(CONFIG_MAPPING[family]())


def test_a_part_gives_whole_rows_of_log_probs():
    """One rank that holds both chunks: rows of an odd length are padded inside, and nothing of it is seen outside."""
    register_packed_attention()
    model = build_hf("llama")
    model.set_attn_implementation("packed")
    part = ModelPart(model, HeadKind("plain"))
    batch = packed_batch([[token_row(4), token_row(7, 1)], [token_row(11, 2)]])
    want = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    part.share_context(Exchange(0, 1, [], ring=False))
    assert part.boundary_shape(2, 11) == (2, 12)
    got = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    assert got.shape == (2, 11) and torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_host_tells_where_labels_are_among_the_tokens_of_each_rank(size: int):
    """As the rank's own share of the labels says."""
    labels_BT = torch.randint(0, 9, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    labels_BT[labels_BT < 5] = IGNORE_INDEX
    positions_S = (labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
    for rank in range(size):
        context = context_of(rank, size)
        wanted_S = (context.local(labels_BT, IGNORE_INDEX).flatten() != IGNORE_INDEX).nonzero()[:, 0]
        assert torch.equal(context.local_label_positions(positions_S), wanted_S)
