"""Linear layers that add gradients in their products, where one process is enough (tests/dist/test_added.py has the
rest)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion_linear


def test_an_input_that_is_changed_in_place_afterwards_is_an_error_as_for_torchs_layers() -> None:
    ours, torchs = nn.Linear(4, 4), nn.Linear(4, 4)
    wgrad_fusion_linear.fuse_wgrad(ours, None)
    for linear in (torchs, ours):
        x = torch.ones(2, 4, requires_grad=True) * 1
        with wgrad_fusion_linear.single_backward():
            y = linear(x)
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified"):
                y.sum().backward()
