"""Which kernel packed attention runs on, why not another, and that a wrong one is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import cudnn, dense, kernel_probes, kernel_selection, packed
from automodel_cli.models.attention import kernels as attention_kernels
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.attention.ring_calls import Setting
from automodel_cli.models.config import ModelConfig
from tests.errors import raises

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    kernel_selection.choose_kernel("auto", CPU)


@pytest.mark.parametrize(
    ("capability", "module", "reason"),
    [
        (None, "torch", "CUDA"),
        ((8, 0), "torch", "8.0"),
        ((9, 0), "flash_attn_interface_of_nobody", "is not installed"),
        ((9, 0), "nobody.at.all", "is not installed"),
        ((9, 0), "torch", ""),
    ],
)
def test_a_newer_kernel_is_left_alone_for_a_reason(capability, module: str, reason: str):
    said = kernel_selection.why_kernel_unsupported("FA3", (9,), module, capability)
    assert (reason in said) if reason else not said
    assert "FA9" in kernel_selection.why_kernel_unsupported("FA9", (9,), "torch", (9, 0))


def test_a_kernel_by_name_is_refused_where_it_cannot_run():
    with raises(ConfigError, "kernel_unavailable", keys=("model.attention_kernel",), values=("fa3", "CUDA")):
        kernel_selection.choose_kernel("fa3", CPU)
    with raises(ConfigError, "no_effect", keys=("attention_kernel", "attn_implementation"), values=("flash",)):
        ModelConfig(config={"model_type": "llama"}, attn_implementation="sdpa", attention_kernel="flash")


class _FlashCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "flash_attention" in str(func)
        return func(*args, **(kwargs or {}))


def _attend(softcap: float | None = None) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 24, 16, generator=generator) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 7, 24], dtype=torch.int32)
    with _FlashCalls() as calls:
        out, _ = packed_attention(
            torch.nn.Module(), query, key, value, None, softcap=softcap, cu_seq_lens_q=bounds, max_length_q=17
        )
    return out, calls.count


def test_dense_attention_can_be_asked_for_and_gives_the_same():
    flash, num_calls = _attend()
    kernel_selection.choose_kernel("dense", CPU)
    dense, none = _attend()
    assert num_calls > 0
    assert none == 0
    torch.testing.assert_close(dense, flash, rtol=1e-5, atol=1e-6)


def test_a_flash_kernel_by_name_is_never_silently_dense():
    _, num_calls = _attend(softcap=30.0)
    assert num_calls == 0
    kernel_selection.choose_kernel("flash", CPU)
    with raises(ConfigError, "kernel_unavailable", keys=("attention_kernel",), values=("flash", 30)):
        _attend(softcap=30.0)


def _documents(cu, left, *flat):
    """Of each document: its tokens of every tensor as [1, heads, tokens, width] in float32, and its mask."""
    for a, b in ((a, b) for a, b in pairwise(cu.tolist()) if a < b):
        parts = [attention_kernels.per_query_head(x[a:b].transpose(0, 1)[None].float(), 4) for x in flat]
        window = None if left is None else left + 1
        yield slice(a, b), parts, dense.visible_mask(b - a, (b - a,), (0,), window, torch.float32, CPU)


def _operator(*, ignores_windows: bool) -> torch.library.Library:
    """aten's variable-length flash attention for the CPU, by the definition; or with a mistake."""

    def forward(q, k, v, cu_q, *arguments, scale, window_size_left=None, window_size_right=None):
        out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), torch.empty(q.shape[1], q.shape[0])
        for tokens, parts, mask in _documents(cu_q, None if ignores_windows else window_size_left, q, k, v):
            one, one_lse = dense.dense_forward(*parts, mask, scale, None)
            out[tokens], lse[:, tokens] = one[0].transpose(0, 1).to(q.dtype), one_lse[0]
        nothing = torch.zeros(2, dtype=torch.uint64)
        return out, lse, nothing, nothing[0].clone(), torch.empty(0)

    def backward(grad, q, k, v, out, lse, cu_q, *arguments, scale, window_size_left=None, window_size_right=None):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        left = None if ignores_windows else window_size_left
        for tokens, (dout, *qkv, one), mask in _documents(cu_q, left, grad, q, k, v, out):
            found = dense.dense_backward(dout, *qkv, mask, one, lse[None, :, tokens], scale, None)
            for whole, of_heads in zip(grads, found, strict=True):
                of_kv = of_heads[0].unflatten(0, (whole.shape[1], -1)).sum(1)
                whole[tokens] = of_kv.transpose(0, 1).to(whole.dtype)
        return tuple(grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


@pytest.mark.parametrize("ignores_windows", [False, True])
def test_an_implementation_is_compared_with_the_definition_before_it_is_trusted(ignores_windows: bool):
    assert kernel_selection.pads_widths(CPU), "there is no such kernel yet"
    library = _operator(ignores_windows=ignores_windows)
    try:
        error, pads = kernel_probes.kernel_error(CPU), kernel_selection.pads_widths(CPU)
    finally:
        library._destroy()
    assert error > 0
    assert (error > kernel_selection._PROBE_ERROR) == ignores_windows
    assert pads == ignores_windows, "values narrower than keys, as they are"


def _cudnn_operator(seen: list[tuple[list[int], int, int]], *, grouped: bool = True) -> torch.library.Library:
    """aten's cuDNN attention for the CPU, by the definition, with log-sum-exps as [N, H, 1]; or without grouped heads.
    `seen` receives the bounds and the two lengths of each call."""

    def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, stats, dropout, causal, debug=False, *, scale):
        assert (bias, stats, dropout, causal, debug) == (None, True, 0.0, True, False)
        assert cu_q.tolist() == cu_k.tolist()
        seen.append((cu_q.tolist(), max_q, max_k))
        out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), torch.empty(*q.shape[:2], 1)
        k, v = (x if grouped else x.flip(1) for x in (k, v))
        for tokens, parts, mask in _documents(cu_q, None, q, k, v):
            one, one_lse = dense.dense_forward(*parts, mask, scale, None)
            out[tokens], lse[tokens, :, 0] = one[0].transpose(0, 1).to(q.dtype), one_lse[0].t()
        number = torch.zeros((), dtype=torch.int64)
        return out, lse, cu_q.clone(), cu_k.clone(), max_q, max_k, number, number.clone(), torch.empty(0)

    def backward(grad, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, *, scale):
        assert (bias, dropout, causal, lse.shape) == (None, 0.0, True, (*q.shape[:2], 1))
        seen.append((cu_q.tolist(), max_q, max_k))
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for tokens, (dout, *qkv, one), mask in _documents(cu_q, None, grad, q, k, v, out):
            found = dense.dense_backward(dout, *qkv, mask, one, lse[tokens, :, 0].t()[None], scale, None)
            for whole, of_heads in zip(grads, found, strict=True):
                of_kv = of_heads[0].unflatten(0, (whole.shape[1], -1)).sum(1)
                whole[tokens] = of_kv.transpose(0, 1).to(whole.dtype)
        return tuple(grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_attention_forward", forward, "CPU")
    library.impl("_cudnn_attention_backward", backward, "CPU")
    return library


@pytest.mark.parametrize("grouped", [True, False])
def test_attention_of_cudnn_is_compared_with_the_definition_before_it_is_trusted(grouped: bool):
    seen: list[tuple[list[int], int, int]] = []
    library = _cudnn_operator(seen, grouped=grouped)
    try:
        error = kernel_probes.cudnn_error(CPU)
    finally:
        library._destroy()
    assert error > 0
    assert (error <= kernel_selection._PROBE_ERROR) == grouped
    assert seen == 2 * [([0, 200, 512, 576, 576], 512, 512)], "four documents of at most 512, forward and backward"


@pytest.mark.parametrize(
    ("torch_version", "cudnn_version", "capability", "reason"),
    [
        ("2.15.0", 92400, (9, 0), ""),
        ("2.16.1+cu130", 92400, (10, 0), ""),
        ("2.15.0", 92400, None, "CUDA"),
        ("2.13.0+cu130", 92400, (9, 0), "2.13.0"),
        ("2.15.0", 92400, (8, 0), "8.0"),
        ("2.15.0", 91700, (9, 0), "91700"),
        ("2.15.0", None, (9, 0), "None"),
    ],
)
def test_attention_of_cudnn_is_left_alone_for_a_reason(torch_version, cudnn_version, capability, reason, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
    said = cudnn.why_unavailable(capability)
    assert (reason in said) if reason else not said


def test_cudnn_computes_whole_causal_documents_and_leaves_the_rest_to_flash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91800)
    query, bounds = torch.zeros(300, 4, 64), torch.tensor([0, 140, 300], dtype=torch.int32)
    plan = attention_kernels.VarlenPlan(bounds, bounds, 160, 160, None)
    assert cudnn.supports(query, query, plan, None, None)
    assert cudnn.supports(query, query, plan, None, 160), "a window that hides nothing"
    assert not cudnn.supports(query, query, plan, None, 159)
    assert not cudnn.supports(query, query, plan, torch.zeros(4), None)
    assert not cudnn.supports(torch.zeros(300, 4, 192), query, plan, None, None)
    assert not cudnn.supports(query, query, plan._replace(max_q=128), None, None)
    assert not cudnn.supports(query, query, plan._replace(key_index=torch.arange(300)), None, None)
    assert not cudnn.supports(query, query, plan._replace(cu_k=bounds + 3), None, None)
    with raises(ConfigError, "kernel_unavailable", keys=("model.attention_kernel",), values=("cudnn", "CUDA")):
        kernel_selection.choose_kernel("cudnn", CPU)


def test_packed_attention_passes_each_layer_to_the_operator_that_computes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    monkeypatch.setattr(kernel_selection, "_chosen", kernel_selection.KernelChoice("cudnn", device_type="cuda"))
    generator, bounds = torch.Generator().manual_seed(1), torch.tensor([0, 7, 24], dtype=torch.int32)
    flat = [torch.randn(24, heads, 16, generator=generator) for heads in (4, 2, 2)]
    seen: list[tuple[list[int], int, int]] = []
    libraries = _cudnn_operator(seen), _operator(ignores_windows=False)
    found = {}
    try:
        for window in (None, 5):
            setting = Setting(0.25, window, None, "flash")
            found[window] = packed._in_one_kernel(*flat, None, setting, (bounds, 17, 1, 24, CPU, None), None)
    finally:
        for library in libraries:
            library._destroy()
    assert seen == [([0, 7, 24], 32, 32)], "the layer without a window"
    for window, out in found.items():
        for tokens, parts, mask in _documents(bounds, None if window is None else window - 1, *flat):
            want = dense.dense(*parts, mask, scale=0.25)[0].transpose(0, 1)
            torch.testing.assert_close(out[tokens], want, rtol=1e-5, atol=1e-6)


def test_layers_share_the_rounded_bounds_of_a_microbatch():
    bounds = torch.tensor([0, 140, 290, 300], dtype=torch.int32)
    plan = attention_kernels.VarlenPlan(bounds, bounds, 150, 150, None)
    (first, longest), (second, _) = cudnn._rounded_up(plan), cudnn._rounded_up(plan)
    assert first is second
    assert (first.tolist(), longest) == ([0, 140, 290, 300, 300], 256)


def test_a_run_on_gpus_probes_small_copies_by_the_cpus_kernels(monkeypatch: pytest.MonkeyPatch):
    on_gpus = kernel_selection.KernelChoice("flex", forced=True, device_type="cuda")
    monkeypatch.setattr(kernel_selection, "_chosen", on_gpus)
    x = torch.zeros(1, 2, 8, 16)
    assert kernel_selection.way(x, x, None) == ("flash", "")
    assert kernel_selection.way(x, x, 30.0) == ("dense", ""), "without the warning of a run"
    with raises(ConfigError, "kernel_unavailable", keys=("attention_kernel",), values=("flex", "float64")):
        kernel_selection.way(x.to("meta", torch.float64), x, None)
