"""Fixtures of several rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist  # most files of unit tests need no torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
