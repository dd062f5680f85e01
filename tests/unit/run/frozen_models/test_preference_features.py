"""Losses that sort pairs and weights of how likely they are: TRL's numbers, in whatever microbatches the pairs come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.online_dpo import OnlineDPO
from automodel_cli.objectives.preference_settings import SORTED
from automodel_cli.run.frozen_models.preference_features import matched
from tests.unit.objectives.test_vectors import rows_as_batch

FILE = json.loads((Path(__file__).parents[3] / "vectors" / "trl.json").read_text())["preference"]
GIVEN = {name: torch.tensor(values) for name, values in FILE["given"].items()}
NAMES = {"loss": "loss", "label_smoothing": "label_smoothing", "wpo": "use_wpo_weighting"}


def microbatch(pairs: range):
    """(log-probs, the logits that they are of, batch) of these pairs; the chosen responses are the first five rows."""
    rows = [*pairs, *(5 + p for p in pairs)]
    leaf = torch.tensor(FILE["given"]["logits_RTV"], dtype=torch.float64)[rows].requires_grad_()
    labels, mask = GIVEN["labels_RT"][rows, :, None], GIVEN["mask_RT"][rows]

    def drawn(logits):
        found = logits.log_softmax(-1).gather(-1, labels)[..., 0] * mask[:, 1:]
        return torch.nn.functional.pad(found, (0, 1))

    count = len(pairs)
    ref = torch.tensor(FILE["given"]["ref_RT"], dtype=torch.float64)[rows]
    batch = rows_as_batch(
        mask,
        torch.ones(len(rows)),
        pairs_P2=torch.arange(2 * count).view(2, count).T,
        ref_logprobs_BT=torch.nn.functional.pad(ref, (0, 1)),
        sharpened_logprobs_BT=drawn(2 * leaf.detach()),
    )
    return drawn(leaf), leaf, batch


@pytest.mark.parametrize("case", FILE["cases"], ids=lambda c: " ".join(str(c[name]) for name in sorted(NAMES)))
def test_losses_and_gradients_are_trls_in_one_microbatch_and_in_two(case):
    objective = DPO(beta=0.3, **{ours: case[name] for name, ours in NAMES.items()})
    for split in ([range(5)], [range(2), range(2, 5)]):
        made = [microbatch(pairs) for pairs in split]
        if objective.loss in SORTED:
            compared = [objective.compared(logprobs.detach(), batch) for logprobs, _, batch in made]
            partners = matched(torch.cat(compared)).split([len(of) for of in compared])
            made = [(*m[:2], m[2].with_columns(partners_P2=of)) for m, of in zip(made, partners, strict=True)]
        value = sum(objective(HeadOutput(logprobs), batch) for logprobs, _, batch in made) / 5
        value.backward()
        assert value.item() == pytest.approx(case["value"], abs=1e-6)
        found = torch.empty(10, 4, 4, dtype=torch.float64)
        for pairs, (_, leaf, _) in zip(split, made, strict=True):
            found[[*pairs, *(5 + p for p in pairs)]] = leaf.grad
        torch.testing.assert_close(found, torch.tensor(case["gradient_RTV"], dtype=torch.float64), atol=1e-6, rtol=0)


def test_pairs_that_do_not_count_are_nobodys_partners():
    compared = torch.tensor([[3.0, 10.0, 1.0], [9.0, 99.0, 0.0], [1.0, 30.0, 1.0], [2.0, 20.0, 1.0]])
    assert matched(compared).tolist() == [[30, 1], [0, 0], [10, 3], [20, 2]]
    assert matched(compared[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (DPO, {"loss": "aot", "use_wpo_weighting": True}, "use_wpo_weighting"),
        (DPO, {"loss": "aot", "ld_alpha": 0.5}, "ld_alpha"),
        (DPO, {"loss": "aot_unpaired", "average_log_probs": True}, "average_log_probs"),
        (DPO, {"extra_losses": {"aot": 0.5}}, "extra_losses"),
        (OnlineDPO, {"loss": "aot"}, "loss"),
        (OnlineDPO, {"use_wpo_weighting": True}, "use_wpo_weighting"),
    ],
)
def test_refused(kind, options, key):
    with pytest.raises(ConfigError) as caught:
        kind(**options)
    assert key in caught.value.keys
