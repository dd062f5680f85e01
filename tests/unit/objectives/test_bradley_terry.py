"""The loss of reward models: TRL's numbers, and that a score is that of the conversation's last token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.bradley_terry import BradleyTerry
from tests.errors import raises

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "trl.json").read_text())["reward"]


def packed(scores_2P: Tensor, margins_P: Tensor) -> tuple[HeadOutput, Batch]:
    """All conversations in one row, of 2, 3, 4, ... tokens: any value but the last one's would be 1000."""
    scores_S = scores_2P.T.flatten()  # chosen and rejected in turns
    lengths = torch.arange(2, 2 + len(scores_S))
    ends = lengths.cumsum(0)
    values_T = torch.full((int(ends[-1]),), 1000.0, dtype=torch.float64).index_put((ends - 1,), scores_S)
    labels_T = torch.full((int(ends[-1]),), 7)
    labels_T[ends - 1] = -100
    batch = Batch(
        input_ids_BT=torch.zeros_like(labels_T)[None],
        labels_BT=labels_T[None],
        position_ids_BT=torch.zeros_like(labels_T)[None],
        cu_seqlens=torch.cat([torch.zeros(1), ends]).int(),
        max_seqlen=int(lengths.max()),
        row_ids_B=torch.zeros(1),
        extra={"pairs_P2": torch.arange(len(scores_S)).view(-1, 2), "margins_P": margins_P},
    )
    return HeadOutput(torch.zeros(batch.shape), values_BT=values_T[None]), batch


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"margin={case['margin']} center={case['center']}")
def test_loss_gradient_and_accuracy_are_those_of_trl(case):
    scores_2P = torch.tensor(case["scores_2P"], dtype=torch.float64, requires_grad=True)
    output, batch = packed(scores_2P, torch.tensor(case["margins_P"], dtype=torch.float64))
    objective = BradleyTerry(margin=case["margin"], center_rewards_coef=case["center"])
    loss = objective(output, batch) / objective.weight(batch)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-7)
    assert torch.allclose(scores_2P.grad, torch.tensor(case["gradient_2P"], dtype=torch.float64), atol=1e-8)
    measured = objective.measure(output, batch)
    assert (measured["accuracy"] / measured["num_pairs"]).item() == pytest.approx(case["accuracy"])


def test_a_pair_without_label_tokens_does_not_count():
    output, batch = packed(torch.tensor([[3.0, 9.0], [1.0, -9.0]]).double(), torch.zeros(2))
    batch.labels_BT[0, int(batch.cu_seqlens[2]) :] = -100
    objective = BradleyTerry()
    assert objective.weight(batch) == 1
    assert objective(output, batch).item() == pytest.approx(torch.nn.functional.softplus(torch.tensor(-2.0)).item())


def test_a_center_below_0_is_refused():
    with raises(ConfigError, "out_of_range", keys=("center_rewards_coef",), values=(-1,)):
        BradleyTerry(center_rewards_coef=-1)
