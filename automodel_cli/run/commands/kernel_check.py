"""Kernels of this machine for `automodel doctor`: which run, what falls back and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed import kernel_report
from automodel_cli.distributed.compile_modes import AUTO
from automodel_cli.distributed.expert_parallel.permute import has_permute_kernels
from automodel_cli.distributed.expert_parallel.topk_router import has_router_kernels
from automodel_cli.distributed.float8.group_cast import has_cast_kernel
from automodel_cli.distributed.fusion.compiled_regions import region_compiler_for
from automodel_cli.models.attention import flex, kernel_selection
from automodel_cli.models.kernel_lines import recurrent_kernels
from automodel_cli.models.lm_head.kernels import has_head_kernels


def examine_kernels() -> Iterator[tuple[Literal["ok", "warn"], str, str]]:
    """Yield (status, subject, text) for each kernel, measured on the device that runs would use.

    A fallback on a GPU is a warning. On a CPU, Triton kernels are not expected.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel_report.clear()
    try:
        yield "ok", "attention", str(kernel_selection.choose_kernel("auto", device))
    except ConfigError as error:
        yield "warn", "attention", error.message
    no_flex = flex.why_unavailable(device)
    yield "ok", "FlexAttention", f"not available ({no_flex})" if no_flex else "available"
    for has_kernels in (has_head_kernels, has_router_kernels, has_permute_kernels, has_cast_kernel):
        has_kernels.__wrapped__(device.type)  # not cached, so that it records its line
    if region_compiler_for(AUTO, "inductor", device, torch.bfloat16) is not None:
        kernel_report.record("fused ops", "compiled by inductor at the start of each run")
    for subject, text in kernel_report.lines().items():
        falls_back = device.type == "cuda" and text.startswith("torch operators")
        yield "warn" if falls_back else "ok", subject, text
    yield "ok", "recurrent layers", recurrent_kernels()
