"""Classification losses: those of torch on the labeled examples, however the batch is packed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.classification import Classification, MultiLabel, Regression, SingleLabel
from tests.errors import raises

NAMES = ["a", "b", "c"]
SCORES = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([2, 0, 0, 1, -1])
TARGETS = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [math.nan] * 3], dtype=torch.float64)


def packed(scores_SL: Tensor, **columns: Tensor) -> tuple[HeadOutput, Batch]:
    """Documents of 2, 3, ... tokens in one row, the last without a label: every score but the last token's is 1000."""
    lengths = torch.arange(2, 2 + len(scores_SL))
    ends = lengths.cumsum(0)
    scores_TL = torch.full((int(ends[-1]), 3), 1000.0, dtype=torch.float64).index_put((ends - 1,), scores_SL)
    labels_BT = torch.zeros(1, int(ends[-1]), dtype=torch.int64)
    batch = Batch(
        input_ids_BT=labels_BT,
        labels_BT=labels_BT,
        position_ids_BT=labels_BT,
        cu_seqlens=torch.cat([torch.zeros(1), ends]).int(),
        max_seqlen=int(lengths.max()),
        row_ids_B=torch.zeros(1),
        extra=columns,
    )
    return HeadOutput(torch.zeros(batch.shape), scores_BTL=scores_TL[None]), batch


WEIGHTS = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
NAMED = {"b": 0.5, "c": 3.0}
CASES: dict[str, tuple[Classification, nn.Module]] = {
    "single": (SingleLabel(labels=NAMES), nn.CrossEntropyLoss()),
    "weighted": (SingleLabel(labels=NAMES, class_weights=NAMED), nn.CrossEntropyLoss(WEIGHTS)),
    "multi": (MultiLabel(labels=NAMES), nn.BCEWithLogitsLoss()),
    "weighted multi": (MultiLabel(labels=NAMES, class_weights=NAMED), nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    "regression": (Regression(labels=NAMES), nn.MSELoss()),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_torch(name):
    objective, theirs = CASES[name]
    ours_SL, theirs_SL = (SCORES.clone().requires_grad_() for _ in range(2))
    targets = CLASSES if "class_ids_S" in objective.columns else TARGETS
    output, batch = packed(ours_SL, **dict.fromkeys(objective.columns, targets))
    loss = objective(output, batch) / objective.weight(batch)
    expected = theirs(theirs_SL[:4], targets[:4])
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-7)
    assert torch.allclose(ours_SL.grad, theirs_SL.grad, atol=1e-8) and not ours_SL.grad[4].any()


def test_metrics_count_examples_with_a_label():
    output, batch = packed(torch.eye(3, dtype=torch.float64)[[2, 1, 0, 1, 0]] - 0.5, class_ids_S=CLASSES)
    measured = SingleLabel(labels=NAMES).measure(output, batch)
    assert (measured["accuracy"].item(), measured["num_examples"].item()) == (3, 4)
    output, batch = packed(TARGETS.nan_to_num() - 0.5, targets_SL=TARGETS)
    assert MultiLabel(labels=NAMES).measure(output, batch)["accuracy"].item() == 4
    assert Regression(labels=NAMES).measure(output, batch)["mae"].item() == pytest.approx(4 * 0.5)


def test_tokens_are_examples_at_their_own_position():
    output, batch = packed(SCORES)
    classes_BT = torch.full(batch.shape, -1)
    classes_BT[0, 1] = 1  # the last token of the first document
    batch = batch.with_columns(class_ids_BT=classes_BT)
    objective = SingleLabel(labels=NAMES, token_level=True)
    expected = nn.functional.cross_entropy(SCORES[:1], torch.tensor([1]))
    assert objective(output, batch).item() == pytest.approx(expected.item()) and objective.weight(batch) == 1


def test_labels_and_weights_are_checked():
    with raises(ConfigError, "missing_key", keys=("labels",)):
        SingleLabel()
    with raises(ConfigError, "invalid_value", keys=("labels",), fix="objective.labels=[a,b]"):
        SingleLabel(labels=["a", "b", "a"])
    fix = "objective.class_weights={} 'objective.class_weights={bad: 2, good: 0.5}'"
    with raises(ConfigError, "unknown_name", keys=("class_weights",), fix=fix):
        SingleLabel(labels=["bad", "good"], class_weights={"bat": 2.0, "good": 0.5})
    with raises(ConfigError, "out_of_range", fix="objective.class_weights={} 'objective.class_weights={a: 1, b: 0.5}'"):
        MultiLabel(labels=["a", "b"], class_weights={"a": 0.0, "b": 0.5})
    for weight in (0.0, math.inf, math.nan):
        with raises(ConfigError, "out_of_range", keys=("class_weights",)):
            MultiLabel(labels=["a"], class_weights={"a": weight})
