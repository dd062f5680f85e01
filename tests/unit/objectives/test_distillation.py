"""Divergences between teacher and student: TRL's numbers on whole vocabularies, and the likeliest tokens by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.parity.reference import output_of
from tests.errors import raises

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "trl.json").read_text())["distillation"]


def compared(student_BTV: Tensor, teacher_BTV: Tensor, labels_BT: Tensor, k: int) -> tuple[HeadOutput, Batch]:
    """What the head gives of the student's logits, and rows with the teacher's `k` likeliest tokens."""
    top = teacher_BTV.log_softmax(-1).topk(k)
    rows, tokens = labels_BT.shape
    batch = Batch(
        input_ids_BT=labels_BT.clamp(min=0),
        labels_BT=labels_BT,
        position_ids_BT=torch.arange(tokens).expand(rows, tokens),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * tokens,
        max_seqlen=tokens,
        row_ids_B=torch.arange(rows),
        extra={"teacher_logprobs_BTN": top.values, "teacher_ids_BTN": top.indices},
    )
    objective = Distillation()
    flat = output_of(student_BTV.flatten(0, 1), labels_BT.flatten(), objective.needs, top.indices.flatten(0, 1))
    return HeadOutput(*(None if of is None else of.unflatten(0, labels_BT.shape) for of in flat)), batch


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"beta={case['beta']}")
def test_on_the_whole_vocabulary_loss_and_gradient_are_those_of_trl(case):
    student_BTV = torch.tensor(case["student_BTV"], dtype=torch.float64, requires_grad=True)
    teacher_BTV, labels_BT = torch.tensor(case["teacher_BTV"], dtype=torch.float64), torch.tensor(case["labels_BT"])
    output, batch = compared(student_BTV, teacher_BTV, labels_BT, 6)
    objective = Distillation(beta=case["beta"], top_k=None)
    loss = objective(output, batch) / objective.weight(batch)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert torch.allclose(student_BTV.grad, torch.tensor(case["gradient_BTV"], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_of_the_likeliest_tokens_all_others_are_one_more(beta):
    case = CASES[0]
    student_BTV, teacher_BTV = (
        torch.tensor(case[f"{name}_BTV"], dtype=torch.float64) for name in ("student", "teacher")
    )
    labels_BT = torch.tensor(case["labels_BT"])
    output, batch = compared(student_BTV, teacher_BTV, labels_BT, 2)
    want = nll = share = 0.0
    for b, t in (labels_BT >= 0).nonzero().tolist():
        p, q = (logits[b, t].softmax(-1).tolist() for logits in (teacher_BTV, student_BTV))
        top = sorted(range(6), key=lambda v: -p[v])[:2]
        p3, q3 = ([x[v] for v in top] + [1 - sum(x[v] for v in top)] for x in (p, q))
        m3 = [beta * a + (1 - beta) * b for a, b in zip(p3, q3, strict=True)]
        if beta == 0:
            want += sum(a * math.log(a / b) for a, b in zip(p3, q3, strict=True))
        elif beta == 1:
            want += sum(b * math.log(b / a) for a, b in zip(p3, q3, strict=True))
        else:
            want += beta * sum(a * math.log(a / m) for a, m in zip(p3, m3, strict=True))
            want += (1 - beta) * sum(b * math.log(b / m) for b, m in zip(q3, m3, strict=True))
        nll -= math.log(q[labels_BT[b, t]])
        share += sum(p3[:2])
    objective = Distillation(beta=beta, top_k=2, kd_weight=0.5, nll_weight=0.25)
    assert objective(output, batch).item() == pytest.approx(0.5 * want + 0.25 * nll, abs=1e-6)
    measured = {name: value.item() for name, value in objective.measure(output, batch).items()}
    assert measured == pytest.approx({"kd_loss": want, "nll": nll, "teacher_share": share, "num_compared_tokens": 6})


@pytest.mark.parametrize("options", [{"beta": 1.5}, {"top_k": 0}, {"kd_weight": 0.0}, {"nll_weight": -1.0}])
def test_settings_without_a_meaning_are_refused(options):
    with raises(ConfigError, "out_of_range", keys=tuple(options), values=tuple(options.values())):
        Distillation(**options)
