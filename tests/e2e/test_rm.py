"""`automodel rm llm`: a reward model that transformers loads with its scores, in stages too; it rewards samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_cli.models.checkpoint_io.export_check import Precision, measure_export_error
from automodel_cli.models.checkpoint_io.sequence_classifier import load_classifier
from automodel_cli.models.score_head import ScoreHead
from automodel_cli.rollout.rewards.base import RewardInput
from automodel_cli.rollout.rewards.reward_model import RewardModel
from tests.e2e.command import automodel, curve, metrics
from tests.e2e.test_dpo import PAIRS
from tests.errors import assert_error

pytestmark = pytest.mark.slow

SCORES = PAIRS.replace("[dpo,", "[rm,").replace("tie_word_embeddings: true", "tie_word_embeddings: false")
STEPS = ("train.max_steps=4", "logging.report=false", "data.seq_len=96", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    (folder / "scores.yaml").write_text(SCORES.format(family="llama"))
    return folder


def train(folder: Path, name: str, *overrides: str) -> list[float]:
    done = automodel(folder, "rm", "llm", "-c", "scores.yaml", f"run_name={name}", *STEPS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return curve(folder / "runs" / name)


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    return train(folder, "whole")


def test_starts_at_ln_2_and_exports_a_classifier_without_a_language_head(folder, losses):
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    first, *_, last = metrics(folder / "runs" / "whole")
    assert first["val_accuracy"] == 0 and last["val_num_pairs"] == 16
    export = folder / "runs" / "whole" / "export"
    names = [name for file in export.glob("*.safetensors") for name in load_file(file)]
    assert "score.weight" in names and not any("lm_head" in name or "value_head" in name for name in names)
    assert json.loads((export / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]


def test_stages_train_and_export_the_same_scores(folder, losses):
    staged = train(folder, "stages", "mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b")
    assert staged == pytest.approx(losses, rel=2e-6)
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    exports = [folder / "runs" / name / "export" for name in ("whole", "stages")]
    whole, _ = models = [load_classifier(path, torch.float32) for path in exports]
    scores = [[model(torch.tensor([row])).logits[0, 0] for row in rows] for model in models]
    assert scores[0][0].abs() > 1e-3 and torch.allclose(*(torch.stack(s) for s in scores), atol=1e-5)
    exact = Precision(torch.float32, rounds_weights=False)
    assert measure_export_error(exports[1], rows, scores[0], exact, score_head=ScoreHead()).worst < 1e-5
    whole.score.weight.data.mul_(1.1)
    wrong = [whole(torch.tensor([row])).logits[0, 0].detach() for row in rows]
    assert measure_export_error(exports[1], rows, wrong, exact, score_head=ScoreHead()).worst > 1e-4


def test_as_a_reward_it_scores_a_held_out_pair_as_its_training_did(folder, losses):
    """The mean score of the chosen responses, which validation has measured on packed rows."""
    from automodel_cli.data.synthetic.chat_tasks import ChatTasks
    from automodel_cli.data.synthetic.preference_tasks import PreferenceTasks

    reward = RewardModel(folder=str(folder / "runs" / "whole" / "export"))
    pairs = list(PreferenceTasks(ChatTasks(num_train=200, num_validation=16)).rows("validation"))
    empty = RewardInput(name="x", completion="", row={}, messages=pairs[0]["prompt"])
    assert reward.score(empty) != 0 and reward.on_error == "skip", "0 would be better than most answers"
    for side in ("chosen", "rejected"):
        scores = [reward.score(RewardInput(name="x", completion=p[side], row=p, messages=p["prompt"])) for p in pairs]
        measured = metrics(folder / "runs" / "whole")[-1][f"val_score_{side}"]
        assert sum(scores) / len(scores) == pytest.approx(measured, abs=1e-5)


def test_a_margin_moves_the_loss_and_must_be_in_the_data(folder, losses):
    rows = [{"prompt": f"{i} + 1", "chosen": str(i + 1), "rejected": str(i + 3), "margin": 2.0} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data.generator=null", "data.path=pairs.jsonl", "data.validation_size=8", "objective.margin=true")
    assert train(folder, "margin", *data)[0] == pytest.approx(2.126928, abs=1e-5)  # softplus(2)
    done = automodel(folder, "rm", "llm", "-c", "scores.yaml", *STEPS, *data[:-1], "run_name=unread")
    assert "margins   the pairs have them, and this loss does not read them: objective.margin=true does" in done.stdout
    done = automodel(folder, "rm", "llm", "-c", "scores.yaml", *STEPS, "objective.margin=true")
    assert done.returncode == 3
    assert_error(done.stderr, "missing_key", "objective.margin")


def test_an_objective_without_scores_and_other_kinds_are_refused(folder):
    done = automodel(folder, "check", "-c", "scores.yaml", "objective=ipo")
    assert done.returncode == 2
    assert_error(done.stderr, "not_supported", "objective", fix="objective=reward")
    done = automodel(folder, "rm", "llm", "-c", "quickstart_dpo")
    assert done.returncode == 2
    assert_error(done.stderr, "wrong_recipe", values=("quickstart_dpo", "rm"))
