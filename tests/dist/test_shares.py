"""A tensor that every rank has, in shares and together again: values and gradients against the whole one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from automodel_cli.distributed.scatter_gather import gather_from_group, scatter_to_group
from tests.dist.harness import launch_all


def _there_and_back(rank, world, dim, padded):
    """Every share times its rank + 1: (values equal, gradients equal, entries of this rank)."""
    group = dist.group.WORLD
    whole = torch.arange(1.0, 15.0).view(7, 2).movedim(0, dim).requires_grad_()
    share = scatter_to_group(whole, group, dim, padded=padded)
    back = gather_from_group(share * (rank + 1), 7, group, dim)
    (back * back.detach()).sum().backward()
    scale = torch.tensor([1.0, 1, 1, 2, 2, 2, 3])[:, None].movedim(0, dim)
    return torch.equal(back, whole * scale), torch.allclose(whole.grad, whole * scale**2), share.shape[dim]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("padded", [False, True])
def test_entries_that_do_not_divide_are_shared_and_gathered(dim: int, padded: bool):
    last = 3 if padded else 1
    assert launch_all(_there_and_back, 3, dim, padded) == [(True, True, 3), (True, True, 3), (True, True, last)]
