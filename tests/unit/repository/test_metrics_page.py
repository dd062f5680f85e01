"""Every metric that an objective can give stands in docs/metrics.md."""

from __future__ import annotations

import pytest

from automodel_cli.objectives.best_of_n import BestOfN
from automodel_cli.objectives.bradley_terry import BradleyTerry
from automodel_cli.objectives.classification import Regression, SingleLabel
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.embedding import InfoNCE
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.kto import KTO
from automodel_cli.objectives.online_dpo import OnlineDPO
from automodel_cli.objectives.ppo import PPO
from tests.pages import documented_metrics

EVERYTHING = {"kl_coef": 0.1, "dual_clip_ratio": 3.0, "positive_nll_coef": 0.1, "top_entropy_fraction": 0.2}
CORRECTED = {"sampler_correction": "truncate", "sampler_correction_clip_max": 2.0}


@pytest.mark.parametrize(
    "objective",
    [
        GRPO(**EVERYTHING, **CORRECTED),
        PPO(kl_coef=0.1, kl_placement="reward"),
        DPO(use_wpo_weighting=True, nll_weight=0.1),
        OnlineDPO(),
        KTO(),
        BestOfN(),
        BradleyTerry(),
        SingleLabel(labels=["a", "b"]),
        Regression(),
        InfoNCE(),
        Distillation(),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_its_metrics_stand_on_the_page(objective) -> None:
    assert set(objective.metrics) <= documented_metrics()
