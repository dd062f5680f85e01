"""Megatron-FSDP on CPU ranks, by a stand-in for `torch.cuda`: every strategy against one process, and what follows a
step (optimizer, clipping, checkpoints, export) against the whole model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from automodel_cli.distributed.config import MegatronFSDPConfig
from tests.dist import cuda_stand_in
from tests.dist.harness import launch
from tests.dist.parity import Case, compare

pytest.importorskip("megatron_fsdp", reason="pip install automodel-cli[megatron]")

TOLERANCE = 1e-6
MEGATRON = MegatronFSDPConfig()


def _compare(rank, world, cases, sabotage=None):
    cuda_stand_in.install()
    return compare(rank, world, cases, sabotage)


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_every_strategy_has_the_numbers_of_one_process(strategy):
    cases = [Case("qwen3", config=replace(MEGATRON, zero_dp_strategy=strategy), num_microbatches=n) for n in (3, 1)]
    for errors in launch(_compare, 2, cases):
        assert errors.within(TOLERANCE), errors
