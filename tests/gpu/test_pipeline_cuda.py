"""Two pipeline stages on one GPU, a rank each, against one process on the CPU: loss, norm, values and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.dist.harness import launch
from tests.dist.pipeline_cases import Case, Errors, run_cases
from tests.gpu.staged import messages_through_the_host

_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble")
CASES = [
    *(Case(schedule, "qwen3", "variable") for schedule in _SCHEDULES),
    Case("1F1B", "gpt_oss", "tied"),
    Case("ZBVZeroBubble", "qwen3_moe", "masked"),
]


def run(rank: int, world: int, device: str) -> list[Errors]:
    """Run the cases in float32 with every rank on the same device."""
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    with messages_through_the_host():
        return run_cases(rank, world, CASES, device=device)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_two_stages_on_one_device_give_the_numbers_of_one_process(device: str):
    for case, errors in zip(CASES, launch(run, 2, device, timeout=300), strict=True):
        assert errors.worst <= 1e-4, f"{case}: {errors}"
