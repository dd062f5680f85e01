"""The weight that is quantized."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.distributed.activation_checkpointing.apply import KEPT_RESULTS
from automodel_cli.distributed.qat.formats import Format
from automodel_cli.distributed.qat.settings import FakeQuantization, LowRank

SHAPES = (6, 4), (2, 4), (6, 2)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[object] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def test_the_sum_with_an_update_is_nothing_that_selective_checkpointing_saves():
    """It has the size of the weight, in float32."""
    weight, a_RI, b_OR = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES)
    with Operators() as operators:
        found = FakeQuantization(Format("int8"), None).rounded(weight, LowRank(a_RI, b_OR, 0.5))
    torch.testing.assert_close(found, (weight.double() + 0.5 * b_OR.double() @ a_RI.double()).float())
    assert operators.seen and not operators.seen & KEPT_RESULTS
