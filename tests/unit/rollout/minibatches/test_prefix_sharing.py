"""What keeps prompts from being shared, and that asking for it all the same is refused."""

from __future__ import annotations

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.fp8_config import TransformerEngineConfig
from automodel_cli.models.moe_config import MoEConfig
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.config_checks import check_shared_prompts, why_prompts_not_shared
from tests.errors import raises

SECTIONS = {
    "rollout": RolloutConfig(),
    "data": DataConfig(path="rows.jsonl"),
    "model": ModelConfig(pretrained="-"),
    "mesh": MeshConfig(),
    "parallelizer": FSDP2Config(),
}


def test_nothing_keeps_a_plain_config_from_it():
    assert why_prompts_not_shared(**SECTIONS) == ""
    check_shared_prompts(RolloutConfig(share_prompt_prefix=True), "")


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("rollout", RolloutConfig(group_size=1, advantage_estimator="batch"), "rollout.group_size=1"),
        ("data", DataConfig(path="rows.jsonl", packing="none"), "data.packing=none"),
        ("model", ModelConfig(pretrained="-", attn_implementation="eager"), "model.attn_implementation=eager"),
        ("model", ModelConfig(pretrained="-", transformer_engine=TransformerEngineConfig()), "Transformer Engine"),
        ("model", ModelConfig(pretrained="-", moe=MoEConfig(aux_loss_coef=0.01)), "aux_loss_coef"),
        ("model", ModelConfig(pretrained="-", moe=MoEConfig(bias_update_rate=0.01)), "bias_update_rate"),
        ("mesh", MeshConfig(cp_size=2), "mesh.cp_size=2"),
        ("parallelizer", FSDP2Config(enable_compile=True), "enable_compile=true"),
    ],
)
def test_a_reason_is_named_and_refuses_what_asks_for_it_by_name(section, value, reason):
    found = why_prompts_not_shared(**{**SECTIONS, section: value})
    assert reason in found
    check_shared_prompts(RolloutConfig(), found)
    with raises(ConfigError, "unsupported_combination", fix="rollout.share_prompt_prefix=auto") as error:
        check_shared_prompts(RolloutConfig(share_prompt_prefix=True), found)
    assert reason in str(error.value)
