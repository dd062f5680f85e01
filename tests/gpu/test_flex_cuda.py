"""FlexAttention's kernels against the definition in float64: what flash kernels refuse, and how often they compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernel_selection
from automodel_cli.models.attention.packed import packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    kernel_selection.choose_kernel("auto", torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "softcap"),
    [
        (torch.bfloat16, 256, 256, 50.0),  # gemma2
        (torch.float32, 128, 128, None),
        (torch.bfloat16, 192, 128, None),  # latent attention, not padded
        (torch.bfloat16, 512, 512, None),  # wider than a flash kernel's
        (torch.float16, 20, 20, None),
        (torch.float32, 8, 8, 5.0),  # narrower than Triton's products
    ],
)
def test_a_kernel_is_the_definition_forward_and_backward(dtype, width: int, value_width: int, softcap: float | None):
    """Three documents, a window, grouped heads and a sink."""
    error = attention_flex.flex_error(CUDA, dtype, width, value_width, softcap)
    assert error < (2e-3 if dtype == torch.float32 else 2e-2)


def test_soft_caps_take_flex_by_themselves_and_no_memory_of_tokens_by_tokens():
    kernel_selection.choose_kernel("auto", CUDA)
    query, key, value = (
        torch.randn(1, heads, 16384, 128, device=CUDA, dtype=torch.bfloat16).requires_grad_() for heads in (8, 4, 4)
    )
    cu = torch.tensor([0, 5000, 16384], dtype=torch.int32, device=CUDA)
    packed_attention(torch.nn.Module(), query, key, value, None, softcap=30.0, cu_seq_lens_q=cu)[0].sum().backward()
    before = len(attention_flex.compilations)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bounds in ([0, 100, 16384], [0, 8192, 9000, 16384]):
            other = torch.tensor(bounds, dtype=torch.int32, pin_memory=True).to(CUDA, non_blocking=True)
            out, _ = packed_attention(torch.nn.Module(), query, key, value, None, softcap=30.0, cu_seq_lens_q=other)
            out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - held < 8 * 16384**2  # scores would be four times as much, in float32
    assert len(attention_flex.compilations) == before, "other documents are the same graph"
