"""The head on CUDA: bf16 factors add up in float32 in place, in one product; the Triton kernels are the definition."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.distributed.wgrad_fusion.linear import _products_add_in_float32, add_product_
from automodel_cli.models.lm_head import kernels as lm_head_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_products_of_bf16_add_up_in_float32():
    assert _products_add_in_float32("cuda", torch.bfloat16)
    left, right = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((4096, 512), (512, 256)))
    total = torch.full((4096, 256), 1000.0, device="cuda")
    want = total.double() + left.double() @ right.double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product_(total, left, right)
    assert (total - want).abs().max() < 1e-3  # a product rounded to bf16 would be off by 0.2
    assert torch.cuda.max_memory_allocated() - before < total.nbytes, "no copy of the total"


def test_the_triton_kernels_agree_with_the_definition_and_are_taken():
    assert lm_head_kernels.head_kernel_error(torch.device("cuda")) < 1e-5
    assert lm_head_kernels.has_head_kernels("cuda")
