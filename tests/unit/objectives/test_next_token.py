"""Pretraining objective by hand: token mean, z-loss gradient by autograd, and bits per byte."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.next_token import NextToken
from automodel_cli.parity.reference import output_of
from tests import tiny
from tests.errors import raises


def test_z_loss_adds_its_gradient_but_not_its_value():
    batch = tiny.packed_batch([[tiny.token_row(5), tiny.token_row(7, seed=1)]])
    batch.labels_BT[0, :2] = IGNORE_INDEX
    logits_BTV = torch.randn(1, 12, tiny.VOCAB, generator=torch.Generator().manual_seed(0), requires_grad=True)
    objective = NextToken(z_loss_coef=0.3, bits_per_byte=False)
    assert objective.needs == HeadRequest(lse=True) and NextToken().needs == HeadRequest()
    output = output_of(logits_BTV, batch.labels_BT, objective.needs)
    loss = objective(output, batch) / objective.weight(batch)
    nll = F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE_INDEX)
    assert loss.item() == pytest.approx(nll.item(), rel=1e-6)
    z_BT = logits_BTV.exp().sum(-1).log()[batch.labels_BT != IGNORE_INDEX]
    (got,) = torch.autograd.grad(loss, logits_BTV, retain_graph=True)
    (want,) = torch.autograd.grad(nll + 0.3 * z_BT.square().mean(), logits_BTV)
    assert torch.allclose(got, want, atol=1e-7)
    measured = objective.measure(output.detach(), batch)
    assert set(measured) == set(objective.metrics)
    assert measured["z_loss"] / measured["num_z_tokens"] == pytest.approx(z_BT.square().mean().item(), rel=1e-6)


def test_bits_per_byte():
    batch = tiny.packed_batch([[tiny.token_row(3)]])  # two labels
    output = output_of(torch.zeros(1, 3, 8), batch.labels_BT.clamp(max=7), HeadRequest())
    batch = batch.with_columns(label_bytes_BT=torch.tensor([[4, 1, 0]]))
    measured = NextToken().measure(output, batch)
    assert measured["num_bytes"] == 5
    assert measured["bits_per_byte"].item() == pytest.approx(2 * math.log2(8))


def test_a_negative_coefficient_is_rejected():
    with raises(ConfigError, "out_of_range", keys=("z_loss_coef",)):
        NextToken(z_loss_coef=-1)
