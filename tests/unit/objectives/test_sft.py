"""SFT by hand: a sum over label tokens and their number, so that dividing once gives the token mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.sft import SFT
from tests import tiny


def test_sum_and_weight_are_the_token_mean():
    batch = tiny.packed_batch([[tiny.token_row(5), tiny.token_row(7, seed=1)]])
    batch.labels_BT[0, :2] = IGNORE_INDEX
    logits_BTV = torch.randn(1, 12, tiny.VOCAB, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logprobs_BT = tiny.reference_logprobs(logits_BTV, batch.labels_BT)
    sft = SFT()
    assert sft.weight(batch) == 12 - 2 - 2  # two documents have no next token at their end, two labels are masked
    loss = sft(HeadOutput(logprobs_BT), batch) / sft.weight(batch)
    want = F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE_INDEX)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    (got_grad,) = torch.autograd.grad(loss, logits_BTV, retain_graph=True)
    (want_grad,) = torch.autograd.grad(want, logits_BTV)
    assert torch.allclose(got_grad, want_grad, atol=1e-8)
