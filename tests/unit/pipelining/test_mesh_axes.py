"""Which device stages are built on."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.pipelining.mesh_axes import default_device


def test_a_build_for_cuda_without_a_gpu_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a build names its accelerator unless it is asked whether there is one."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else cuda
    )
    assert default_device() == torch.device("cpu")
