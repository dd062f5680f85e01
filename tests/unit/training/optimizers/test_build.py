"""Sections that are a `_partial_` of `torch.optim` become optimizers with the groups of the nodes, or are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.optimizers.nodes import AdamW
from tests.errors import raises


def test_partial_of_torch_gets_the_same_groups():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8))
    optimizer = build_optimizer(functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.3), [model])
    decayed = [param for group in optimizer.param_groups if group["weight_decay"] == 0.3 for param in group["params"]]
    assert [id(param) for param in decayed] == [id(model[1].weight)]  # no embedding, no bias
    assert isinstance(build_optimizer(functools.partial(torch.optim.SGD, lr=0.1), [model]), torch.optim.SGD)
    assert isinstance(build_optimizer(AdamW(lr=1e-3), [model]), torch.optim.AdamW)


@pytest.mark.parametrize(
    ("factory", "code", "value"),
    [
        (functools.partial(torch.optim.Muon, lr=1e-3), "not_supported", "torch.optim.Muon"),
        (functools.partial(torch.optim.LBFGS, lr=1e-3), "not_supported", "torch.optim.LBFGS"),
        (functools.partial(torch.optim.AdamW, lr=1e-3, learning_rate=1), "invalid_arguments", "learning_rate"),
        ("adamw", "wrong_type", "adamw"),
    ],
)
def test_unsupported_optimizers_are_rejected(factory, code, value):
    with raises(ConfigError, code, keys=("optimizer",), values=(value,)):
        build_optimizer(factory, [nn.Linear(2, 2)])
