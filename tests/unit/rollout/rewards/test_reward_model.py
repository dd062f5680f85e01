"""Which folders a reward model is taken from."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.reward_model import RewardModel
from tests.errors import raises


def test_a_folder_that_is_no_reward_model_is_refused_before_anything_is_drawn(tmp_path: Path):
    LlamaConfig().save_pretrained(tmp_path / "language")
    LlamaConfig(num_labels=1).save_pretrained(tmp_path / "scores")
    (tmp_path / "empty").mkdir()
    RewardSum({"model": RewardModel(folder=str(tmp_path / "scores"))}).close()
    codes = {"nowhere": "model_not_found", "empty": "model_not_found", "language": "wrong_model_kind"}
    for name, code in codes.items():
        with raises(ConfigError, code, keys=("folder",), values=(tmp_path / name,)) as caught:
            RewardSum({"model": RewardModel(folder=str(tmp_path / name))})
        assert "automodel rm llm" in caught.value.fix
