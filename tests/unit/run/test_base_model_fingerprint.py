"""A resumed run reads the weights again that it was begun from, wherever they lie now, or is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import RunError
from automodel_cli.config.security.trust import Trust
from automodel_cli.models.config import ModelConfig
from automodel_cli.run.base_model_fingerprint import base_model_fingerprint, check_base_model_unchanged
from tests import tiny
from tests.errors import raises


def _of(folder: Path) -> dict[str, str] | None:
    return base_model_fingerprint(ModelConfig(pretrained=str(folder)))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and the same with one number changed in the middle of a file's last MiB."""
    model = tiny.build_hf("llama")
    model.save_pretrained(tmp_path / "mine")
    with_other_norm = model.state_dict() | {"model.norm.weight": model.model.norm.weight.detach() + 1}
    model.save_pretrained(tmp_path / "other", state_dict=with_other_norm)
    return tmp_path / "mine", tmp_path / "other"


def test_a_fingerprint_is_of_the_weights_alone(folders: tuple[Path, Path], one_rank: None) -> None:
    mine, other = folders
    before = _of(mine)
    moved = mine.rename(mine.parent / "elsewhere")
    os.utime(moved / "model.safetensors", (1, 1))
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")
    assert before is not None and before["named"] == f"model.pretrained={mine}"
    assert _of(moved) == before | {"named": f"model.pretrained={moved}"}
    assert _of(other)["fingerprint"] != before["fingerprint"]
    assert base_model_fingerprint(ModelConfig(config={"model_type": "llama"})) is None


LORA, PLAIN = ("quickstart", "model.lora={rank: 4}"), ("quickstart",)
NO_KL = ("quickstart_grpo",)
KL_LOSS = (*NO_KL, "objective.kl_coef=0.1")
KL_REWARD = (*KL_LOSS, "objective.kl_placement=reward")
DPO, SIMPO = ("quickstart_dpo",), ("quickstart_dpo", "objective=simpo")


@pytest.mark.parametrize(
    ("words", "read"),
    [(PLAIN, None), (NO_KL, None), (SIMPO, None), (LORA, "adapters")]
    + [(words, "reference") for words in (KL_LOSS, KL_REWARD, DPO)],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_others_are_refused_where_they_would_be_read(words: tuple[str, ...], read: str | None) -> None:
    recipe = check_config(compose(words[0], words[1:]), Trust())
    mine, theirs = ({"named": f"model.pretrained={name}", "fingerprint": name} for name in ("mine", "theirs"))
    assert check_base_model_unchanged(recipe, mine, mine | {"named": "a link"}) is None
    assert check_base_model_unchanged(recipe, None, theirs) is check_base_model_unchanged(recipe, mine, None) is None
    if read is None:
        assert "resumes from the weights of the checkpoint" in (check_base_model_unchanged(recipe, mine, theirs) or "")
        return
    fix = "model.pretrained=theirs"
    with raises(RunError, "checkpoint_mismatch", keys=("model.pretrained",), values=(read,), fix=fix):
        check_base_model_unchanged(recipe, mine, theirs)
