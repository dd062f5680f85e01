"""What a process says and sets before torch is there, and attention that is dense says so."""

from __future__ import annotations

import logging

import pytest
import torch

from automodel_cli.launch import startup
from automodel_cli.models import attention, attention_kernels


def test_the_allocator_grows_segments_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert startup.allocator() == "torch's own"
    startup.grow_segments()
    assert startup.allocator() == "expandable_segments:True   (PYTORCH_CUDA_ALLOC_CONF)"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    startup.grow_segments()
    assert startup.allocator() == "max_split_size_mb:64   (PYTORCH_ALLOC_CONF)"


@pytest.mark.parametrize(
    ("dtype", "width", "softcap", "reason"),
    [
        (torch.bfloat16, 64, None, ""),
        (torch.bfloat16, 64, 50.0, "soft caps (here 50)"),
        (torch.float32, 64, None, "float32: bfloat16 or float16 are needed"),
        (torch.float16, 20, None, "heads of width 20: a multiple of 8 up to 256 is needed"),
        (torch.bfloat16, 288, None, "heads of width 288: a multiple of 8 up to 256 is needed"),
    ],
)
def test_why_a_flash_kernel_does_not_take_a_layer(dtype, width, softcap, reason) -> None:
    query = torch.zeros(1, 2, 3, width, dtype=dtype, device="meta")
    assert attention_kernels.why_not_flash_cuda(query, query, softcap) == reason


def test_dense_attention_on_a_device_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """On the meta device, which is no CPU."""
    attention._say_that_it_is_dense.cache_clear()
    x = torch.zeros(1, 2, 8, 16, device="meta")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attention.packed_attention(torch.nn.Module(), x, x, x, None)
    (record,) = caplog.records
    assert "attention is computed densely" in record.getMessage() and "float32" in record.getMessage()
