"""Which tokens count, which modules are routers, and what is refused."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, SeenKeys
from automodel_cli.models.moe.load_balancing import routers
from automodel_cli.models.moe.real_tokens import real_tokens
from automodel_cli.models.moe_config import MoEConfig
from tests import tiny
from tests.dist.parity import tiny_part
from tests.errors import raises


def test_tokens_of_documents_without_a_label_do_not_count():
    labels_BT = torch.full((2, 6), IGNORE_INDEX)
    labels_BT[0, 1] = 7  # first document of the first row; its second one is not trained on
    labels_BT[1, 3] = 7  # the second row's document; its last two tokens are padding
    cu_seqlens = torch.tensor([0, 4, 6, 10, 12], dtype=torch.int32)
    want = [[True] * 4 + [False] * 2, [True] * 4 + [False] * 2]
    assert real_tokens(labels_BT, cu_seqlens).tolist() == want


def test_a_prefix_counts_where_a_document_that_sees_it_has_a_label():
    labels_BT = torch.full((1, 12), IGNORE_INDEX)
    labels_BT[0, 5] = 7  # of the second document that sees the first prefix; nobody who sees the other one has a label
    bounds = (0, 3, 5, 7, 9, 11, 12)
    seen = SeenKeys.of(bounds, ((0, 0), (0, 3), (0, 3), (0, 0), (7, 2), (0, 0)))
    want = [True] * 3 + [False] * 2 + [True] * 2 + [False] * 5
    assert real_tokens(labels_BT, torch.tensor(bounds, dtype=torch.int32), seen).tolist() == [want]


@pytest.mark.parametrize(
    ("family", "layers", "name"),
    [("qwen3_moe", 4, "gate"), ("mixtral", 4, "gate"), ("gpt_oss", 4, "router"), ("deepseek_v3", 3, "gate")],
)
def test_routers_are_found_beside_their_experts(family, layers, name):
    found = [path for path, _, _ in routers(tiny_part(family))]
    assert len(found) == layers and all(path.endswith(f".mlp.{name}") for path in found)
    assert not list(routers(tiny_part("llama")))


@pytest.mark.parametrize("field", ["aux_loss_coef", "bias_update_rate"])
def test_negative_options_are_refused(field):
    with raises(ConfigError, "out_of_range", keys=(field,), values=(-1.0,), fix=f"model.moe.{field}=0"):
        MoEConfig(**{field: -1.0})


def test_the_kernel_of_the_experts_is_chosen_and_refused_for_a_dense_model():
    from automodel_cli.models.builder import build_part
    from automodel_cli.models.config import ModelConfig

    fields = tiny.tiny_fields("qwen3_moe")
    default = build_part(ModelConfig(config=fields))
    eager = build_part(ModelConfig(config=fields, moe=MoEConfig(experts_implementation="eager")))
    assert [p.model.config._experts_implementation for p in (default, eager)] == ["grouped_mm", "eager"]
    keys = ("moe.experts_implementation",)
    with raises(ConfigError, "not_supported_by_model", keys=keys, values=("eager", "LlamaForCausalLM")):
        build_part(ModelConfig(config=tiny.tiny_fields("llama"), moe=MoEConfig(experts_implementation="eager")))
