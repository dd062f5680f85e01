"""Loss weights and losses of datasets by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import LOSS_WEIGHTS, SOURCES, HeadOutput
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.objectives.mtp import WithMultiToken
from automodel_cli.objectives.next_token import NextToken
from automodel_cli.objectives.sft import SFT
from automodel_cli.objectives.sources import with_source_losses
from tests import tiny

NAMES = ("web", "code", "none")


def batch_and_output():
    """Rows of 2 and 3 labels with log-probs -1, -3 of `web` (weight 1) and -2, -2, -5 of `code` (weight 0.5)."""
    batch = tiny.packed_batch([[tiny.token_row(4)], [tiny.token_row(4, seed=1)]])
    labels_BT = batch.labels_BT.clone()
    labels_BT[0, 0] = IGNORE_INDEX
    batch = replace(batch, labels_BT=labels_BT).with_columns(
        **{SOURCES: torch.tensor([0, 1]), LOSS_WEIGHTS: torch.tensor([1.0, 0.5])}
    )
    logprobs_BT = torch.tensor([[0, -1.0, -3, 0], [-2, -2, -5, 0]])
    return batch, HeadOutput(logprobs_BT, further_logprobs_BTM=logprobs_BT[..., None])


def test_weights_scale_loss_and_denominator():
    batch, output = batch_and_output()
    assert SFT()(output, batch).item() == 4 + 0.5 * 9
    assert SFT().weight(batch).item() == 2 + 0.5 * 3
    assert SFT().weight(batch.without_column(LOSS_WEIGHTS)).item() == 5


def test_losses_of_datasets_are_sums_without_their_weights():
    batch, output = batch_and_output()
    measured = {k: v.item() for k, v in with_source_losses(SFT(), NAMES).measure(output, batch).items()}
    assert measured == {
        "loss_web": 4,
        "num_label_tokens_web": 2,
        "loss_code": 9,
        "num_label_tokens_code": 3,
        "loss_none": 0,
        "num_label_tokens_none": 0,
    }
    plain = batch.without_column(SOURCES)
    assert not any(v.item() for v in with_source_losses(SFT(), NAMES).measure(output, plain).values())


def test_the_loss_of_further_tokens_has_the_same_weights():
    batch, output = batch_and_output()
    logprobs = output.further_logprobs_BTM.requires_grad_()
    WithMultiToken(SFT(), 0.3)(output, batch).backward()
    assert logprobs.grad[:, 1, 0].tolist() == pytest.approx([-0.3, -0.15])


def test_one_dataset_and_other_losses_have_no_further_metrics():
    assert with_source_losses(SFT(), ("web",)) == SFT()
    assert with_source_losses(Distillation(), NAMES) == Distillation()


def test_pretraining_has_bits_per_byte_of_each_dataset():
    batch, output = batch_and_output()
    batch = batch.with_columns(label_bytes_BT=torch.tensor([[0, 3, 1, 0], [2, 2, 2, 0]]))
    assert NextToken()(output, batch).item() == 4 + 0.5 * 9
    objective = with_source_losses(NextToken(), NAMES)
    measured = {k: v.item() for k, v in objective.measure(output, batch).items()}
    assert set(measured) == set(objective.metrics)
    assert (measured["num_bytes"], measured["num_bytes_web"], measured["num_bytes_code"]) == (10, 4, 6)
    assert measured["bits_per_byte_web"] == pytest.approx(4 / math.log(2))
    assert measured["bits_per_byte"] == pytest.approx(13 / math.log(2))  # without loss weights
